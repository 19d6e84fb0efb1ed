//! Pictures of shapes, drawn by code: any number of them, each from its seed.

use kiln::Result;
use kiln::data::Random;
use kiln::prelude::*;

/// Pixels along a side.
pub const SIDE: usize = 28;

/// What is on a picture, by its label.
pub const NAMES: [&str; 6] = ["circle", "ring", "square", "triangle", "cross", "star"];

/// So many pictures, of all kinds in turn. A picture's shape, place, size, angle and brightness are its own for
/// ever; its noise is new in every epoch.
pub struct Pictures {
    /// How many.
    pub count: usize,
    /// Other seeds are other pictures.
    pub seed: u64,
}

/// Deviation of the noise, where a shape is between 0.5 and 1 brighter than its background.
const NOISE: f32 = 0.2;

impl Dataset for Pictures {
    type Sample = (Tensor, i64);

    fn len(&self) -> usize {
        self.count
    }

    fn get(&self, index: usize) -> Result<(Tensor, i64)> {
        let mut pixels = self.draw(index);
        let mut random = Random::of_sample(index);
        pixels.iter_mut().for_each(|pixel| *pixel += NOISE * random.normal());
        Ok((Tensor::from_vec(pixels, [1, SIDE, SIDE])?, (index % NAMES.len()) as i64))
    }
}

impl Pictures {
    /// A picture without its noise.
    fn draw(&self, index: usize) -> Vec<f32> {
        let mut random = Random::new(self.seed.wrapping_mul(0x1_0000_0001).wrapping_add(index as u64));
        let half = SIDE as f32 / 2.0;
        let size = random.between(0.45, 0.85) * half;
        let room = half - 0.8 * size;
        let (across, down) =
            (half + random.between(-room, room) * 0.7, half + random.between(-room, room) * 0.7);
        let (sine, cosine) = random.between(0.0, std::f32::consts::TAU).sin_cos();
        let (background, bright) = (random.between(0.0, 0.4), random.between(0.5, 1.0));
        let inside = |x: f32, y: f32| {
            let (x, y) = ((x - across) / size, (y - down) / size);
            covers(index % NAMES.len(), cosine * x + sine * y, cosine * y - sine * x)
        };
        let mut pixels = Vec::with_capacity(SIDE * SIDE);
        for row in 0..SIDE {
            for column in 0..SIDE {
                // Four points of each pixel, for soft edges.
                let points = [(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)];
                let hits = points.iter().filter(|(x, y)| inside(column as f32 + x, row as f32 + y)).count();
                pixels.push(background + bright * hits as f32 / 4.0);
            }
        }
        pixels
    }
}

/// Whether a shape of size 1 around the origin covers a point.
fn covers(label: usize, x: f32, y: f32) -> bool {
    let radius = x.hypot(y);
    match label {
        0 => radius < 0.85,
        1 => (0.5..0.95).contains(&radius),
        2 => x.abs().max(y.abs()) < 0.75,
        // Inside all three edges, each as far from the middle.
        3 => [0.0, 1.0, 2.0].iter().all(|edge| {
            let (sine, cosine) = (edge * std::f32::consts::TAU / 3.0).sin_cos();
            x * cosine + y * sine < 0.5
        }),
        4 => x.abs().min(y.abs()) < 0.25 && x.abs().max(y.abs()) < 0.95,
        // Five points: the rim goes in and out with the angle.
        _ => {
            let turn = (y.atan2(x) / std::f32::consts::TAU * 5.0).rem_euclid(1.0);
            radius < 0.35 + 0.65 * (2.0 * turn - 1.0).abs().powf(1.5)
        }
    }
}

/// A picture as text, two rows of pixels to a line.
pub fn show(pixels: &[f32]) -> Vec<String> {
    let shades: Vec<char> = " .:-=+*#%@".chars().collect();
    let (low, high) = pixels
        .iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), pixel| (low.min(*pixel), high.max(*pixel)));
    let shade = |pixel: f32| {
        let part = (pixel - low) / (high - low).max(f32::MIN_POSITIVE);
        shades[((part * shades.len() as f32) as usize).min(shades.len() - 1)]
    };
    let rows: Vec<&[f32]> = pixels.chunks(SIDE).collect();
    let line = |pair: &[&[f32]]| -> String {
        (0..SIDE).map(|x| shade(pair.iter().map(|row| row[x]).sum::<f32>() / pair.len() as f32)).collect()
    };
    rows.chunks(2).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_are_their_own_and_noise_is_not() -> Result<()> {
        let pictures = Pictures { count: 12, seed: 1 };
        assert_eq!(pictures.draw(4), pictures.draw(4));
        assert_ne!(pictures.draw(4), pictures.draw(10), "two crosses");
        assert_ne!(pictures.draw(4), Pictures { count: 12, seed: 2 }.draw(4));
        let (picture, label) = pictures.get(4)?;
        assert_eq!((picture.shape().to_vec(), NAMES[label as usize]), (vec![1, SIDE, SIDE], "cross"));
        let noise =
            picture.to_vec::<f32>()?.iter().zip(pictures.draw(4)).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
        let deviation = (noise / (SIDE * SIDE) as f32).sqrt();
        assert!((deviation - NOISE).abs() < 0.05, "{deviation}");
        Ok(())
    }

    #[test]
    fn every_shape_is_there_and_leaves_room() {
        for index in 0..60 {
            let pixels = Pictures { count: 60, seed: 3 }.draw(index);
            let low = pixels.iter().copied().fold(f32::INFINITY, f32::min);
            let covered =
                pixels.iter().filter(|pixel| **pixel > low + 0.2).count() as f32 / pixels.len() as f32;
            assert!((0.03..0.7).contains(&covered), "{} covers {covered}", NAMES[index % NAMES.len()]);
            assert_eq!(show(&pixels).len(), SIDE / 2);
        }
    }
}
