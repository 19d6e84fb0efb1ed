//! [`Plot`]: curves as a picture in SVG, which every browser shows.

use std::fmt::Write;
use std::path::Path;

use kiln_nn::internal::write_text;
use kiln_tensor::Result;

/// Curves over a common axis, with a title, labels, a grid and a legend.
///
/// ```
/// use kiln_training::Plot;
/// let svg = Plot::new("Loss").labels("step", "loss").line("training", vec![(0.0, 4.2), (100.0, 2.5)]).to_svg();
/// assert!(svg.starts_with("<svg") && svg.contains("training"));
/// ```
#[derive(Clone, Debug)]
pub struct Plot {
    title: String,
    across: String,
    up: String,
    lines: Vec<Line>,
}

#[derive(Clone, Debug)]
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

// The picture, and the frame that the curves are in.
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = WIDTH - 24.0;
const TOP: f64 = 52.0;
const BOTTOM: f64 = HEIGHT - 58.0;

/// Colours that can be told apart, in light and in print.
const COLOURS: [&str; 6] = ["#2563b0", "#d1571f", "#2f8f4e", "#8a4fb5", "#b0872a", "#3c9aa5"];
/// A line with more points than this is drawn in the colour's light shade, with its average over it.
const NOISY: usize = 60;
/// The average goes over this share of a line.
const SMOOTHING: usize = 40;

impl Plot {
    /// Nothing but a title.
    pub fn new(title: impl Into<String>) -> Plot {
        Plot { title: title.into(), across: String::new(), up: String::new(), lines: Vec::new() }
    }

    /// What the axes mean.
    pub fn labels(mut self, across: impl Into<String>, up: impl Into<String>) -> Plot {
        (self.across, self.up) = (across.into(), up.into());
        self
    }

    /// Adds a curve. NaN points leave gaps; a curve with many points also gets its moving average.
    pub fn line(mut self, name: impl Into<String>, points: Vec<(f64, f64)>) -> Plot {
        self.lines.push(Line { name: name.into(), points });
        self
    }

    /// Writes the picture to a file, which appears when it is complete.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        write_text(path.as_ref(), &self.to_svg())
    }

    /// The picture as text.
    pub fn to_svg(&self) -> String {
        let finite = || self.lines.iter().flat_map(|line| &line.points).filter(|p| is_finite(p));
        let across = Axis::around(finite().map(|point| point.0), false);
        let up = Axis::around(finite().map(|point| point.1), true);
        let mut svg = Svg(String::new());
        svg.put(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"system-ui, sans-serif\" font-size=\"13\" fill=\"#333\">"
        ));
        svg.put(format_args!("<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>"));
        svg.put(format_args!(
            "<text x=\"{LEFT}\" y=\"30\" font-size=\"17\" font-weight=\"600\">{}</text>",
            escaped(&self.title)
        ));
        let x = |number: f64| LEFT + across.part(number) * (RIGHT - LEFT);
        let y = |number: f64| BOTTOM - up.part(number) * (BOTTOM - TOP);
        for tick in up.ticks() {
            let at = y(tick);
            let (baseline, number) = (at + 4.5, up.show(tick));
            svg.put(format_args!("<path d=\"M{LEFT} {at:.1}H{RIGHT}\" stroke=\"#e4e4e4\"/>"));
            svg.put(format_args!(
                "<text x=\"{}\" y=\"{baseline:.1}\" text-anchor=\"end\">{number}</text>",
                LEFT - 9.0
            ));
        }
        for tick in across.ticks() {
            let (at, number) = (x(tick), across.show(tick));
            svg.put(format_args!("<path d=\"M{at:.1} {BOTTOM}v5\" stroke=\"#888\"/>"));
            svg.put(format_args!(
                "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{number}</text>",
                BOTTOM + 21.0
            ));
        }
        svg.put(format_args!("<path d=\"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}\" fill=\"none\" stroke=\"#888\"/>"));
        let (middle, centre) = ((LEFT + RIGHT) / 2.0, (TOP + BOTTOM) / 2.0);
        svg.put(format_args!(
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 14.0,
            escaped(&self.across)
        ));
        svg.put(format_args!(
            "<text transform=\"translate(20 {centre}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escaped(&self.up)
        ));
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            let noisy = line.points.len() > NOISY;
            let (width, opacity) = if noisy { (1.0, 0.3) } else { (2.2, 1.0) };
            svg.curve(
                &line.points,
                x,
                y,
                &format!("stroke=\"{colour}\" stroke-width=\"{width}\" opacity=\"{opacity}\""),
            );
            if noisy {
                let average = moving_average(&line.points, line.points.len() / SMOOTHING);
                svg.curve(&average, x, y, &format!("stroke=\"{colour}\" stroke-width=\"2.2\""));
            }
        }
        self.legend(&mut svg);
        svg.0.push_str("</svg>\n");
        svg.0
    }

    /// The names of the lines, from the right, on the title's line.
    fn legend(&self, svg: &mut Svg) {
        let mut right = RIGHT;
        for (number, line) in self.lines.iter().enumerate().rev() {
            let colour = COLOURS[number % COLOURS.len()];
            // Letters are about this wide; the picture does not depend on it.
            let width = 7.2 * line.name.chars().count() as f64;
            let name = escaped(&line.name);
            svg.put(format_args!("<text x=\"{right:.1}\" y=\"30\" text-anchor=\"end\">{name}</text>"));
            svg.put(format_args!(
                "<path d=\"M{:.1} 25.5h20\" stroke=\"{colour}\" stroke-width=\"3\"/>",
                right - width - 26.0
            ));
            right -= width + 50.0;
        }
    }
}

fn is_finite(point: &(f64, f64)) -> bool {
    point.0.is_finite() && point.1.is_finite()
}

/// Each point with the mean of those around it, up to `reach` on either side.
fn moving_average(points: &[(f64, f64)], reach: usize) -> Vec<(f64, f64)> {
    let points: Vec<(f64, f64)> = points.iter().copied().filter(is_finite).collect();
    let mean = |at: usize| {
        // As many on either side, so that an end is not drawn towards the middle.
        let reach = reach.min(at).min(points.len() - 1 - at);
        let around = &points[at - reach..=at + reach];
        (points[at].0, around.iter().map(|point| point.1).sum::<f64>() / around.len() as f64)
    };
    (0..points.len()).map(mean).collect()
}

/// Text as it may stand in XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

struct Svg(String);

impl Svg {
    fn put(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string never fails.
        let _ = writeln!(self.0, "{line}");
    }

    fn curve(&mut self, points: &[(f64, f64)], x: impl Fn(f64) -> f64, y: impl Fn(f64) -> f64, style: &str) {
        for piece in points.split(|point| !is_finite(point)).filter(|piece| !piece.is_empty()) {
            let mut path = String::new();
            for (number, (across, up)) in piece.iter().enumerate() {
                let letter = if number == 0 { 'M' } else { 'L' };
                let _ = write!(path, "{letter}{:.1} {:.1}", x(*across), y(*up));
            }
            // A single point is a dot.
            let path = if piece.len() == 1 { format!("{path}h0") } else { path };
            self.put(format_args!(
                "<path d=\"{path}\" fill=\"none\" stroke-linejoin=\"round\" stroke-linecap=\"round\" {style}/>"
            ));
        }
    }
}

/// A range of numbers, and round ones in it.
struct Axis {
    low: f64,
    high: f64,
    step: f64,
}

impl Axis {
    /// The axis that shows all numbers; `rounded` ends at round ones.
    fn around(numbers: impl Iterator<Item = f64>, rounded: bool) -> Axis {
        let (low, high) = numbers.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), number| {
            (low.min(number), high.max(number))
        });
        let (low, high) = match (low, high) {
            (low, high) if low > high => (0.0, 1.0),
            // One number alone stands in the middle.
            (low, high) if low == high => (low - low.abs().max(1.0) / 2.0, high + high.abs().max(1.0) / 2.0),
            range => range,
        };
        let step = round_step((high - low) / 6.0);
        if rounded {
            Axis { low: (low / step).floor() * step, high: (high / step).ceil() * step, step }
        } else {
            Axis { low, high, step }
        }
    }

    /// Where a number is, from 0 to 1.
    fn part(&self, number: f64) -> f64 {
        (number - self.low) / (self.high - self.low)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let (first, step) = ((self.low / self.step - 1e-9).ceil(), self.step);
        let last = (self.high / self.step + 1e-9).floor();
        (0..=(last - first) as usize).map(move |number| (first + number as f64) * step)
    }

    /// A tick with as many digits as the steps need.
    fn show(&self, tick: f64) -> String {
        let digits = (-self.step.log10().floor()).clamp(0.0, 12.0) as usize;
        if tick.abs() >= 1e6 { format!("{tick:.1e}") } else { format!("{tick:.digits$}") }
    }
}

/// 1, 2 or 5 times a power of ten, at least this.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= step);
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(numbers: &[f64], rounded: bool) -> Vec<String> {
        let axis = Axis::around(numbers.iter().copied(), rounded);
        axis.ticks().map(|tick| axis.show(tick)).collect()
    }

    #[test]
    fn ticks_are_round_numbers_in_the_range() {
        assert_eq!(ticks(&[0.0, 500.0], false), ["0", "100", "200", "300", "400", "500"]);
        assert_eq!(ticks(&[1.31, 4.4], true), ["1", "2", "3", "4", "5"]);
        assert_eq!(ticks(&[0.912, 0.988], true), ["0.90", "0.92", "0.94", "0.96", "0.98", "1.00"]);
        assert_eq!(ticks(&[2.0, 2.0], false), ["1.0", "1.5", "2.0", "2.5", "3.0"]);
        assert!(!ticks(&[], true).is_empty());
    }

    #[test]
    fn curves_are_within_the_frame_and_leave_gaps() {
        let points = vec![(0.0, 4.0), (1.0, 3.0), (2.0, f64::NAN), (3.0, 2.0), (4.0, 1.0)];
        let svg = Plot::new("a < b & c").line("loss", points).to_svg();
        assert!(svg.contains("a &lt; b &amp; c") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
        let curves: Vec<&str> = svg.lines().filter(|line| line.contains("stroke-linejoin")).collect();
        assert_eq!(curves.len(), 2, "{svg}");
        assert!(curves[0].contains(&format!("M{LEFT:.1} {TOP:.1}")), "{}", curves[0]);
        assert!(curves[1].contains(&format!("L{RIGHT:.1} {BOTTOM:.1}")), "{}", curves[1]);
    }

    #[test]
    fn a_noisy_line_gets_its_average() {
        let points: Vec<(f64, f64)> = (0..200).map(|n| (f64::from(n), f64::from(n % 2))).collect();
        let average = moving_average(&points, 5);
        assert_eq!((average.len(), average[0], average[199]), (200, (0.0, 0.0), (199.0, 1.0)));
        assert!(average[5..195].iter().all(|point| (point.1 - 0.5).abs() < 0.1));
        let svg = Plot::new("").line("noise", points).to_svg();
        assert_eq!(svg.lines().filter(|line| line.contains("stroke-linejoin")).count(), 2);
        assert!(Plot::new("nothing").to_svg().contains("nothing"));
    }
}
