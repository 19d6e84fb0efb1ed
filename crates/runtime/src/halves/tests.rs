//! Products of halves beside f64.

use super::*;
use crate::cpu::Pairs;

/// A matrix of halves in memory of its own, laid out in one of several ways.
struct Owned {
    values: Vec<u16>,
    offset: usize,
    row: isize,
    column: isize,
}

impl Owned {
    fn new([rows, columns]: [usize; 2], layout: usize, mut value: impl FnMut() -> u16) -> Owned {
        let (row, column) = match layout {
            0 => (columns, 1),
            1 => (1, rows),
            2 => (columns + 3, 1),
            3 => (1, rows + 5),
            _ => (3 * columns + 1, 3),
        };
        let length = 1 + rows.saturating_sub(1) * row + columns.saturating_sub(1) * column;
        let values = (0..length).map(|_| value()).collect();
        let (row, column) = (row as isize, column as isize);
        // The last layout runs its columns backwards.
        if layout >= 4 {
            Owned { values, offset: columns.saturating_sub(1) * 3, row, column: -column }
        } else {
            Owned { values, offset: 0, row, column }
        }
    }

    fn matrix(&mut self) -> Matrix<u16> {
        Matrix::new(self.values.as_mut_ptr().wrapping_add(self.offset), self.row, self.column)
    }

    fn get(&self, half: Half, i: usize, j: usize) -> f64 {
        let at = self.offset as isize + i as isize * self.row + j as isize * self.column;
        f64::from(f32::from_bits(half.widen(self.values[at as usize])))
    }
}

struct Words(u64);
impl Words {
    fn next(&mut self) -> u32 {
        self.0 += 1;
        crate::random::philox(self.0, 5)[0]
    }
    fn below(&mut self, end: usize) -> usize {
        self.next() as usize % end
    }
}

/// Sizes 0 and 1, odd ones, several blocks and stretches.
fn shapes(words: &mut Words) -> Vec<Shape> {
    let mut shapes =
        vec![(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (1, 300, 70), (300, 1, 71), (64, 256, 256)];
    shapes.extend([(3, 600, 41), (4, 33, 64), (520, 2, 131), (2, 3, 77)]);
    shapes.extend([(16, 530, 601), (20, 130, 1031), (200, 10, 300), (9, 256, 64), (1, 1, 3001), (90, 33, 9)]);
    shapes.extend((0..25).map(|_| (1 + words.below(70), 1 + words.below(70), words.below(70))));
    shapes.into_iter().map(|(m, n, k)| Shape { m, n, k }).collect()
}

/// Against f64: an f32's roundings along the sum, and one to the half. `scale` makes numbers of any size.
fn check(set: Set, half: Half, scale: f32, step: usize, words: &mut Words) {
    let (half_ulp, least) = match half {
        Half::F16 => (2f64.powi(-11), 2f64.powi(-25)),
        Half::Bf16 => (2f64.powi(-8), 2f64.powi(-134)),
    };
    for shape in shapes(words).into_iter().step_by(step) {
        let Shape { m, n, k } = shape;
        for round in 0..2 {
            let layouts: [usize; 4] = std::array::from_fn(|_| words.below(5));
            let mut value = || half.narrow((words.next() as f32 / 2f32.powi(31) - 1.0) * scale);
            let mut lhs = Owned::new([m, k], layouts[0], &mut value);
            let mut rhs = Owned::new([k, n], layouts[1], &mut value);
            let mut start = Owned::new([m, n], layouts[2], &mut value);
            let mut dst = Owned::new([m, n], layouts[3], || 0x7fff);
            let mut sums = vec![f32::NAN; m * n];
            let with_start = round == 1;
            let to_sums = Results::Sums(Matrix::new(sums.as_mut_ptr(), n as isize, 1));
            for results in [Results::Rounded(dst.matrix()), to_sums] {
                let start = with_start.then(|| start.matrix());
                let product = Product { results, start, lhs: lhs.matrix(), rhs: rhs.matrix() };
                let product = crate::threads::Shared(product);
                // SAFETY: matrices of these shapes in memory of their own.
                unsafe { products_with(set, [Format::Half(half); 2], 1, shape, &|_| product.get()) }.unwrap();
            }
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let mut exact = if with_start { start.get(half, i, j) } else { 0.0 };
                let mut size = exact.abs();
                for p in 0..k {
                    let product = lhs.get(half, i, p) * rhs.get(half, p, j);
                    exact += product;
                    size += product.abs();
                }
                let bound = size * (k as f64 + 2.0) * 2f64.powi(-24) + 2f64.powi(-149) * k as f64;
                let (sum, got) = (f64::from(sums[i * n + j]), dst.get(half, i, j));
                assert!(
                    (sum - exact).abs() <= bound,
                    "{set:?} {half:?} {shape:?} {layouts:?} {i} {j}: {sum} {exact}"
                );
                let bound = bound * 1.01 + exact.abs() * half_ulp + least;
                assert!(
                    (got - exact).abs() <= bound,
                    "{set:?} {half:?} {shape:?} {layouts:?} {i} {j}: {got} {exact}"
                );
                assert_eq!(
                    dst.get(half, i, j),
                    f64::from(f32::from_bits(half.widen(half.narrow(sum as f32))))
                );
            }
            // Nothing between the elements was written.
            let untouched = dst.values.iter().filter(|bits| **bits == 0x7fff).count();
            assert_eq!(untouched, dst.values.len() - m * n, "{shape:?} {layouts:?}");
        }
    }
}

#[test]
fn beside_f64() {
    for set in Set::all() {
        let mut words = Words(1);
        check(set, Half::F16, 1.0, 1, &mut words);
        check(set, Half::Bf16, 1.0, 1, &mut words);
    }
}

/// Subnormal operands, products and sums count, as in f32.
#[test]
fn small_numbers_count() {
    for set in Set::all() {
        let mut words = Words(2);
        check(set, Half::F16, 2f32.powi(-20), 4, &mut words);
        for exponent in [-50, -58, -66, -72, -124, -128] {
            check(set, Half::Bf16, 2f32.powi(exponent), 4, &mut words);
        }
    }
    // A subnormal times a large number is neither.
    let [small, large] = [1_u16, 0x7e80];
    for at in [0, 1, 7] {
        let (mut lhs, mut rhs, mut dst) = (vec![0_u16; 9], vec![0x3f80_u16; 9], [0_u16; 1]);
        (lhs[at], rhs[at]) = (small, large);
        let results = Results::Rounded(Matrix::new(dst.as_mut_ptr(), 1, 1));
        let (lhs, rhs) = (Matrix::new(lhs.as_mut_ptr(), 9, 1), Matrix::new(rhs.as_mut_ptr(), 1, 1));
        let product = crate::threads::Shared(Product { results, start: None, lhs, rhs });
        // SAFETY: nine elements each, and a result.
        unsafe { products(Half::Bf16, 1, Shape { m: 1, n: 1, k: 9 }, &|_| product.get()) }.unwrap();
        let exact = f32::from_bits(Half::Bf16.widen(small)) * f32::from_bits(Half::Bf16.widen(large));
        assert_eq!(dst[0], Half::Bf16.narrow(exact));
    }
}

/// Infinities, NaN and overflow, at any place of a tile, are what they are in f32.
#[test]
fn special_numbers() {
    for (set, half) in Set::all().into_iter().flat_map(|set| [(set, Half::F16), (set, Half::Bf16)]) {
        let [one, large] = [1.0, if half == Half::F16 { 6e4 } else { 3e38 }].map(|x| half.narrow(x));
        let infinity = half.narrow(f32::INFINITY);
        let nan = half.narrow(f32::NAN);
        for (k, at) in [(1, 0), (3, 2), (40, 17)] {
            for (left, right, is_expected) in [
                (infinity, one, (|x: f32| x == f32::INFINITY) as fn(f32) -> bool),
                (infinity | 0x8000, one, |x| x == f32::NEG_INFINITY),
                (infinity, 0, |x| x.is_nan()),
                (nan, one, |x| x.is_nan()),
                (0, nan, |x| x.is_nan()),
                (large, large, |x| x == f32::INFINITY),
            ] {
                let shape = Shape { m: 15, n: 37, k };
                let (mut lhs, mut rhs) = (vec![one; 15 * k], vec![one; k * 37]);
                lhs[13 * k + at] = left;
                rhs[at * 37 + 35] = right;
                let mut dst = vec![0; 15 * 37];
                let results = Results::Rounded(Matrix::new(dst.as_mut_ptr(), 37, 1));
                let lhs = Matrix::new(lhs.as_mut_ptr(), k as isize, 1);
                let rhs = Matrix::new(rhs.as_mut_ptr(), 37, 1);
                let product = crate::threads::Shared(Product { results, start: None, lhs, rhs });
                // SAFETY: matrices of these shapes in memory of their own.
                unsafe { products_with(set, [Format::Half(half); 2], 1, shape, &|_| product.get()) }.unwrap();
                let value = |i: usize, j: usize| f32::from_bits(half.widen(dst[i * 37 + j]));
                assert!(is_expected(value(13, 35)), "{half:?} {k} {left:x} {right:x}: {}", value(13, 35));
                assert_eq!(value(12, 34), k as f32);
            }
        }
    }
}

/// What a matrix's rows are next to, how many products there are, how the right operand lies, and which instructions with
/// fused additions there are, changes no bit.
#[test]
fn bits_do_not_depend_on_tiles() {
    let mut words = Words(7);
    for half in [Half::F16, Half::Bf16] {
        for (m, n, k) in [(70, 90, 300), (300, 40, 65), (60, 1100, 37)] {
            // Among ordinary numbers a few tiny ones, so that some blocks are computed in the other way.
            let mut value = |rare: u32| {
                let tiny = words.next().is_multiple_of(rare);
                half.narrow((words.next() as f32 / 2f32.powi(31) - 1.0) * if tiny { 1e-36 } else { 1.0 })
            };
            let mut lhs: Vec<u16> = (0..m * k).map(|_| value(5000)).collect();
            let mut rhs: Vec<u16> = (0..k * n).map(|_| value(5000)).collect();
            let mut turned: Vec<u16> = (0..k * n).map(|i| rhs[i % k * n + i / k]).collect();
            let lhs = crate::threads::Shared(Matrix::new(lhs.as_mut_ptr(), k as isize, 1));
            let sides = [
                crate::threads::Shared(Matrix::new(rhs.as_mut_ptr(), n as isize, 1)),
                crate::threads::Shared(Matrix::new(turned.as_mut_ptr(), 1, k as isize)),
            ];
            let bits = |set: Set, height: usize, side: usize| -> Vec<u32> {
                let mut dst = vec![f32::NAN; m * n];
                let to = crate::threads::Shared(Matrix::new(dst.as_mut_ptr(), n as isize, 1));
                let product = |number: usize| {
                    let from = number * height;
                    let results = Results::Sums(to.get().at(from, 0));
                    Product { results, start: None, lhs: lhs.get().at(from, 0), rhs: sides[side].get() }
                };
                let shape = Shape { m: height, n, k };
                // SAFETY: bands of rows of matrices of these shapes.
                unsafe { products_with(set, [Format::Half(half); 2], m / height, shape, &product) }.unwrap();
                dst.iter().map(|x| x.to_bits()).collect()
            };
            let mut fused = None;
            for set in Set::all() {
                let whole = bits(set, m, 0);
                // Tiles have an order of their own, which a few rows don't have.
                let is_chain = half == Half::F16 || set.pairs != Pairs::Tiles;
                for (height, side) in [(m, 1), (1, 0), (1, 1), (2, 0), (2, 1), (4, 1), (5, 0), (10, 1)] {
                    if m.is_multiple_of(height) && (is_chain || height > FEW) {
                        let is_same = bits(set, height, side) == whole;
                        assert!(is_same, "{set:?} {half:?} {m} {n} {k}: {height} {side}");
                    }
                }
                if set.isa != Isa::Plain && is_chain {
                    assert!(fused.get_or_insert(whole.clone()) == &whole, "{set:?} {half:?} {m} {n} {k}");
                }
            }
        }
    }
}

/// Tiles, or their model, add up in the order that is written down: in blocks of tiny numbers as well.
#[test]
fn tiles_have_one_order() {
    let mut words = Words(13);
    for set in Set::all().into_iter().filter(|set| set.pairs == Pairs::Tiles) {
        for (m, n, k, exponent) in
            [(5, 3, 1, 0), (33, 70, 31, 0), (70, 33, 33, 0), (64, 64, 900, 0), (40, 65, 77, -62)]
        {
            for layout in 0..2 {
                let scale = 2f32.powi(exponent);
                let mut value = || Half::Bf16.narrow((words.next() as f32 / 2f32.powi(31) - 1.0) * scale);
                let mut lhs = Owned::new([m, k], layout, &mut value);
                let mut rhs = Owned::new([k, n], layout, &mut value);
                let mut dst = vec![f32::NAN; m * n];
                let results = Results::Sums(Matrix::new(dst.as_mut_ptr(), n as isize, 1));
                let product = Shared(Product { results, start: None, lhs: lhs.matrix(), rhs: rhs.matrix() });
                // SAFETY: matrices of these shapes in memory of their own.
                unsafe {
                    products_with(set, [Format::Half(Half::Bf16); 2], 1, Shape { m, n, k }, &|_| {
                        product.get()
                    })
                }
                .unwrap();
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let mut sum = 0.0_f32;
                    for step in (0..k).step_by(2 * amx::SIDE) {
                        let mut chains = [0.0_f32; 2];
                        for p in step..k.min(step + 2 * amx::SIDE) {
                            let [x, y] = [lhs.get(Half::Bf16, i, p), rhs.get(Half::Bf16, p, j)];
                            chains[p % 2] = (x as f32).mul_add(y as f32, chains[p % 2]);
                        }
                        sum += chains[0] + chains[1];
                    }
                    let got = dst[i * n + j];
                    assert_eq!(
                        got.to_bits(),
                        sum.to_bits(),
                        "{m} {n} {k} {exponent} {layout}: {i} {j}: {got} {sum}"
                    );
                }
            }
        }
    }
}

/// Neither does it if panels are packed for all blocks of rows, however many at a time.
#[test]
fn bits_do_not_depend_on_shared_panels() {
    let mut words = Words(11);
    for (half, set) in Set::all().into_iter().flat_map(|set| [(Half::F16, set), (Half::Bf16, set)]) {
        let (m, n, k) = (210, 170, 67);
        let mut value = || half.narrow(words.next() as f32 / 2f32.powi(31) - 1.0);
        let mut lhs: Vec<u16> = (0..m * k).map(|_| value()).collect();
        let mut rhs: Vec<u16> = (0..k * n).map(|_| value()).collect();
        let mut bits = |bytes: Option<usize>| -> Vec<u32> {
            let mut dst = vec![f32::NAN; m * n];
            let results = Results::Sums(Matrix::new(dst.as_mut_ptr(), n as isize, 1));
            let lhs = Matrix::new(lhs.as_mut_ptr(), k as isize, 1);
            let rhs = Matrix::new(rhs.as_mut_ptr(), n as isize, 1);
            let product = Shared(Product { results, start: None, lhs, rhs });
            let shape = Shape { m, n, k };
            let plan = Plan::new([Format::Half(half); 2], set, 1, shape);
            let (height, group) = (24, 2);
            let row_blocks = plan.shape.m.div_ceil(height);
            let groups = plan.shape.n.div_ceil(plan.kernel.width).div_ceil(group);
            let plan = Plan { height, group, row_blocks, groups, ..plan };
            match bytes {
                // SAFETY: matrices of these shapes in memory of their own.
                Some(bytes) => unsafe { plan.one(product.get(), bytes) },
                // SAFETY: as above.
                None => unsafe { products_with(set, [Format::Half(half); 2], 1, shape, &|_| product.get()) },
            }
            .unwrap();
            dst.iter().map(|x| x.to_bits()).collect()
        };
        let whole = bits(None);
        assert!(
            [1, 100_000, 1 << 30].into_iter().all(|bytes| bits(Some(bytes)) == whole),
            "{set:?} {half:?}"
        );
    }
}

/// A matrix in any format, behind some layout.
enum Operand {
    Halves(Half, Owned),
    Floats(Vec<f32>, [usize; 2]),
}

impl Operand {
    fn new(format: Format, size: [usize; 2], layout: usize, mut value: impl FnMut() -> f32) -> Operand {
        match format {
            Format::Half(half) => Operand::Halves(half, Owned::new(size, layout, || half.narrow(value()))),
            Format::F32 => {
                let strides = if layout == 1 { [1, size[0] + 1] } else { [size[1] + layout, 1] };
                Operand::Floats((0..(size[0] + 1) * (size[1] + 4)).map(|_| value()).collect(), strides)
            }
        }
    }
    fn matrix(&mut self) -> Matrix<u16> {
        match self {
            Operand::Halves(_, owned) => owned.matrix(),
            Operand::Floats(values, [row, column]) => {
                format::floats(Matrix::new(values.as_mut_ptr(), *row as isize, *column as isize))
            }
        }
    }
    fn get(&self, i: usize, j: usize) -> f64 {
        match self {
            Operand::Halves(half, owned) => owned.get(*half, i, j),
            Operand::Floats(values, [row, column]) => f64::from(values[i * row + j * column]),
        }
    }
}

/// One operand may be f32, or a half of another format; and bands of rows beside a right operand that is packed once have
/// the same bits.
#[test]
fn operands_of_two_formats_and_bands_of_rows() {
    let mut words = Words(17);
    let [f16, bf16] = [Half::F16, Half::Bf16].map(Format::Half);
    let formats = [[Format::F32, bf16], [f16, Format::F32], [bf16, f16], [bf16, bf16], [f16, f16]];
    for (set, formats) in Set::all().into_iter().flat_map(|set| formats.map(|formats| (set, formats))) {
        for Shape { m, n, k } in shapes(&mut words).into_iter().step_by(3) {
            let layouts: [usize; 2] = std::array::from_fn(|_| words.below(4));
            let mut value = || words.next() as f32 / 2f32.powi(31) - 1.0;
            let mut lhs = Operand::new(formats[0], [m, k], layouts[0], &mut value);
            let mut rhs = Operand::new(formats[1], [k, n], layouts[1], &mut value);
            let mut results = [vec![f32::NAN; m * n], vec![f32::NAN; m * n]];
            let [whole, bands] = results.each_mut().map(|sums| {
                let results = Results::Sums(Matrix::new(sums.as_mut_ptr(), n as isize, 1));
                Shared(Product { results, start: None, lhs: lhs.matrix(), rhs: rhs.matrix() })
            });
            // SAFETY: matrices of these shapes in memory of their own.
            unsafe { products_with(set, formats, 1, Shape { m, n, k }, &|_| whole.get()) }.unwrap();
            // The last band is larger than the others.
            let most = m.min(2 * 32 - 1);
            let banded = Banded::with(set, formats, Shape { m: most, n, k });
            let memory = Buffer::alloc(banded.bytes().max(1)).unwrap();
            let Product { results: Results::Sums(to), lhs: from, rhs: right, .. } = bands.get() else {
                continue;
            };
            // SAFETY: bands of rows of the same; the memory has room.
            unsafe {
                banded.pack(right, memory.as_ptr());
                let mut i = 0;
                while i < m {
                    let rows = if m - i <= most { m - i } else { 32 };
                    let product =
                        Product { results: Results::Sums(to.at(i, 0)), lhs: from.at(i, 0), ..bands.get() };
                    banded.rows(product, rows, memory.as_ptr());
                    i += rows;
                }
            }
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let products = (0..k).map(|p| lhs.get(i, p) * rhs.get(p, j));
                let (exact, size) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                let got = f64::from(results[0][i * n + j]);
                let bound = size * (k as f64 + 2.0) * 2f64.powi(-24) + 1e-40;
                assert!(
                    (got - exact).abs() <= bound,
                    "{set:?} {formats:?} {m} {n} {k} {i} {j}: {got} {exact}"
                );
            }
            // Tiles leave few columns of rows to others.
            if set.pairs != Pairs::Tiles || n > FEW {
                let bits = results.map(|sums| sums.into_iter().map(f32::to_bits).collect::<Vec<_>>());
                assert!(bits[0] == bits[1], "{set:?} {formats:?} {m} {n} {k} {layouts:?}");
            }
        }
    }
}
