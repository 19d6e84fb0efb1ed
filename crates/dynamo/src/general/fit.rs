//! Numbers as polynomials of the sizes that change, found from the numbers at several points.

use std::fmt;

use smallvec::SmallVec;

/// The values of the symbols.
pub(crate) type Point = SmallVec<[i64; 3]>;

/// More sizes than this that change independently of each other are not followed.
pub(crate) const MOST_SYMBOLS: usize = 3;

/// How often each symbol is a factor.
type Powers = [u8; MOST_SYMBOLS];

/// A sum of products of symbols, each with a whole factor.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Polynomial {
    terms: SmallVec<[(Powers, i64); 2]>,
}

/// The product of a point's values.
fn monomial(powers: &Powers, point: &Point) -> i128 {
    let power = |(&value, &power): (&i64, &u8)| i128::from(value).saturating_pow(u32::from(power));
    point.iter().zip(powers).map(power).fold(1, i128::saturating_mul)
}

impl Polynomial {
    pub(crate) fn constant(number: i64) -> Polynomial {
        Polynomial::default().plus([0; MOST_SYMBOLS], number)
    }

    pub(crate) fn symbol(symbol: usize, factor: i64) -> Polynomial {
        let mut powers = [0; MOST_SYMBOLS];
        powers[symbol] = 1;
        Polynomial::default().plus(powers, factor)
    }

    /// factor · ∏ symbols + constant
    pub(crate) fn product(symbols: &[usize], factor: i64, constant: i64) -> Polynomial {
        let mut powers = [0; MOST_SYMBOLS];
        symbols.iter().for_each(|&symbol| powers[symbol] += 1);
        Polynomial::default().plus(powers, factor).plus([0; MOST_SYMBOLS], constant)
    }

    fn plus(mut self, powers: Powers, factor: i64) -> Polynomial {
        if factor != 0 {
            self.terms.push((powers, factor));
        }
        self
    }

    /// Whether no symbol is in it.
    pub(crate) fn is_constant(&self) -> bool {
        self.terms.iter().all(|(powers, _)| powers.iter().all(|&power| power == 0))
    }

    /// Its value; `None` if that is no `i64`.
    pub(crate) fn at(&self, point: &Point) -> Option<i64> {
        let mut sum = 0i128;
        for (powers, factor) in &self.terms {
            sum = sum.checked_add(monomial(powers, point).checked_mul(i128::from(*factor))?)?;
        }
        i64::try_from(sum).ok()
    }

    /// The same number, if a symbol stands for a `unit`-th of what it stood for.
    pub(crate) fn in_units(mut self, symbol: usize, unit: i64) -> Polynomial {
        for (powers, factor) in &mut self.terms {
            *factor *= unit.pow(u32::from(powers[symbol]));
        }
        self
    }
}

impl fmt::Display for Polynomial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.terms.is_empty() {
            return f.write_str("0");
        }
        for (i, (powers, factor)) in self.terms.iter().enumerate() {
            let symbols = powers.iter().enumerate().flat_map(|(s, &n)| (0..n).map(move |_| format!("s{s}")));
            let mut parts: Vec<String> = symbols.collect();
            if factor.abs() != 1 || parts.is_empty() {
                parts.insert(0, factor.abs().to_string());
            }
            let sign = match (i, *factor < 0) {
                (0, false) => "",
                (0, true) => "−",
                (_, false) => " + ",
                (_, true) => " − ",
            };
            write!(f, "{sign}{}", parts.join("·"))?;
        }
        Ok(())
    }
}

/// Sets of products, simple ones first: each is tried as a whole.
fn bases(symbols: usize) -> Vec<Vec<Powers>> {
    let one = [0; MOST_SYMBOLS];
    let product = |factors: &[usize]| {
        let mut powers = one;
        factors.iter().for_each(|&symbol| powers[symbol] += 1);
        powers
    };
    let all = 0..symbols;
    let linear: Vec<Powers> = all.clone().map(|a| product(&[a])).collect();
    let pairs: Vec<Powers> =
        all.clone().flat_map(|a| (0..a).map(move |b| (a, b))).map(|(a, b)| product(&[a, b])).collect();
    let squares: Vec<Powers> = all.clone().map(|a| product(&[a, a])).collect();
    let cubes = match symbols {
        1 => vec![product(&[0, 0, 0])],
        2 => vec![product(&[0, 0, 1]), product(&[0, 1, 1])],
        _ => vec![product(&[0, 1, 2])],
    };
    let mut bases: Vec<Vec<Powers>> = linear.iter().map(|&a| vec![one, a]).collect();
    let mut grown = vec![one];
    for more in [linear, pairs, squares, cubes] {
        grown.extend(more);
        bases.push(grown.clone());
    }
    bases
}

/// Finds polynomials through the same points again and again.
pub(crate) struct Fitter {
    points: Vec<Point>,
    bases: Vec<Vec<Powers>>,
}

impl Fitter {
    /// A polynomial must hold at two points more than it takes to find it.
    pub(crate) fn new(points: Vec<Point>) -> Fitter {
        let symbols = points.first().map_or(0, |point| point.len());
        let mut bases = bases(symbols);
        bases.retain(|basis| basis.len() + 2 <= points.len());
        Fitter { points, bases }
    }

    /// The polynomial that has these values at the points.
    pub(crate) fn fit(&self, values: &[i64]) -> Option<Polynomial> {
        if values.iter().all(|value| *value == values[0]) {
            return Some(Polynomial::constant(values[0]));
        }
        self.bases.iter().find_map(|basis| {
            let factors = solve(basis, &self.points, values)?;
            let found = basis.iter().zip(factors).fold(Polynomial::default(), |sum, (&p, f)| sum.plus(p, f));
            self.holds(|point| found.at(point), values).then_some(found)
        })
    }

    /// Whether something has these values at the points.
    pub(crate) fn holds(&self, at: impl Fn(&Point) -> Option<i64>, values: &[i64]) -> bool {
        self.points.iter().zip(values).all(|(point, value)| at(point) == Some(*value))
    }
}

/// The factors with which a basis has these values at some of the points, rounded to whole numbers.
fn solve(basis: &[Powers], points: &[Point], values: &[i64]) -> Option<Vec<i64>> {
    let width = basis.len();
    let mut rows: Vec<Vec<f64>> = points
        .iter()
        .zip(values)
        .map(|(point, &value)| {
            let products = basis.iter().map(|powers| monomial(powers, point) as f64);
            products.chain([value as f64]).collect()
        })
        .collect();
    for column in 0..width {
        // Rows are compared by what is left of them beside their size.
        let weight = |row: &Vec<f64>| {
            let most = row[..width].iter().fold(0.0f64, |most, x| most.max(x.abs()));
            if most == 0.0 { 0.0 } else { row[column].abs() / most }
        };
        let pivot = (column..rows.len()).max_by(|&a, &b| weight(&rows[a]).total_cmp(&weight(&rows[b])))?;
        rows.swap(column, pivot);
        let pivot = rows[column].clone();
        if pivot[column].abs() < 1e-9 {
            return None;
        }
        for row in rows.iter_mut().skip(column + 1) {
            let share = row[column] / pivot[column];
            row.iter_mut().zip(&pivot).for_each(|(x, p)| *x -= share * p);
        }
    }
    let mut factors = vec![0.0; width];
    for column in (0..width).rev() {
        let known: f64 = (column + 1..width).map(|c| rows[column][c] * factors[c]).sum();
        factors[column] = ((rows[column][width] - known) / rows[column][column]).round();
    }
    factors.into_iter().map(|x| (x.abs() < 9e15).then_some(x as i64)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(values: &[&[i64]]) -> Vec<Point> {
        values.iter().map(|point| Point::from_slice(point)).collect()
    }

    #[track_caller]
    fn check(points: &[Point], number: impl Fn(&Point) -> i64, found: bool) {
        let values: Vec<i64> = points.iter().map(&number).collect();
        let fitted = Fitter::new(points.to_vec()).fit(&values);
        assert_eq!(fitted.is_some(), found, "{fitted:?}");
        if let Some(polynomial) = fitted {
            let outside: Point = points[0].iter().map(|x| 3 * x + 1).collect();
            assert_eq!(polynomial.at(&outside), Some(number(&outside)), "{polynomial:?}");
        }
    }

    #[test]
    fn polynomials_of_one_size_are_found() {
        let points = points(&[&[61], &[251], &[73], &[109], &[151], &[211]]);
        check(&points, |_| 7, true);
        check(&points, |p| p[0], true);
        check(&points, |p| 3072 * p[0] - 64, true);
        check(&points, |p| 12 * p[0] * p[0], true);
        check(&points, |p| 4 * p[0] * p[0] * p[0] + p[0] + 5, true);
        check(&points, |p| p[0] / 2, false);
        check(&points, |p| p[0].min(200), false);
        check(&points, |p| (p[0] + 15) / 16 * 16, false);
    }

    #[test]
    fn polynomials_of_two_sizes_are_found() {
        let points = points(&[
            &[13, 61],
            &[61, 61],
            &[13, 251],
            &[61, 251],
            &[17, 73],
            &[29, 211],
            &[37, 109],
            &[53, 151],
            &[31, 97],
            &[59, 14],
        ]);
        check(&points, |p| p[1], true);
        check(&points, |p| 64 * p[0] * p[1], true);
        check(&points, |p| (p[0] + 1) * (p[1] - 1), true);
        check(&points, |p| 384 * p[0] * p[1] * p[1], true);
        check(&points, |p| p[0] * p[0] + p[1], true);
        check(&points, |p| p[0] * p[1] / 3, false);
        check(&points, |p| p[0].max(p[1]), false);
    }
}
