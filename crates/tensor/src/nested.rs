//! Tensors from nested arrays, and back to nested vectors.

use kiln_ir::{Error, Loc, Result, Shape, Why};

use crate::host::{Element, read_own, reserve};
use crate::{Tensor, TensorOptions, device};

/// Numbers, and arrays, slices and vectors of them, however deep.
pub trait Nested {
    /// The innermost type.
    type Element: Element;
    /// Appends the sizes, outermost first; says which two lengths differ if rows do.
    fn sizes(&self, shape: &mut Shape) -> Result<(), (usize, usize)>;
    /// Appends the elements in row-major order.
    fn elements(&self, out: &mut Vec<Self::Element>);
}

impl<T: Nested> Nested for [T] {
    type Element = T::Element;
    fn sizes(&self, shape: &mut Shape) -> Result<(), (usize, usize)> {
        shape.push(self.len());
        let Some((first, rest)) = self.split_first() else { return Ok(()) };
        let inner = shape.rank();
        first.sizes(shape)?;
        for row in rest {
            let mut own = Shape::default();
            row.sizes(&mut own)?;
            if let Some((a, b)) = shape[inner..].iter().zip(own.iter()).find(|(a, b)| a != b) {
                return Err((*a, *b));
            }
        }
        Ok(())
    }
    fn elements(&self, out: &mut Vec<T::Element>) {
        self.iter().for_each(|row| row.elements(out));
    }
}

impl<T: Nested, const N: usize> Nested for [T; N] {
    type Element = T::Element;
    fn sizes(&self, shape: &mut Shape) -> Result<(), (usize, usize)> {
        self[..].sizes(shape)
    }
    fn elements(&self, out: &mut Vec<T::Element>) {
        self[..].elements(out);
    }
}

impl<T: Nested> Nested for Vec<T> {
    type Element = T::Element;
    fn sizes(&self, shape: &mut Shape) -> Result<(), (usize, usize)> {
        self[..].sizes(shape)
    }
    fn elements(&self, out: &mut Vec<T::Element>) {
        self[..].elements(out);
    }
}

impl<T: Nested + ?Sized> Nested for &T {
    type Element = T::Element;
    fn sizes(&self, shape: &mut Shape) -> Result<(), (usize, usize)> {
        (**self).sizes(shape)
    }
    fn elements(&self, out: &mut Vec<T::Element>) {
        (**self).elements(out);
    }
}

impl Tensor {
    /// A tensor of these numbers: a number, or arrays, slices and vectors of them, however deep.
    ///
    /// ```
    /// use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::new(&[[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu)?;
    /// assert_eq!(x.shape().to_vec(), [3, 2]);
    /// assert_eq!(x.to_vec2::<f32>()?[1], [3.0, 4.0]);
    /// assert!(Tensor::new(&vec![vec![1i64], vec![2, 3]], &Device::Cpu).is_err());
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn new<D: Nested + ?Sized>(data: &D, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let (loc, options) = (Loc::caller(), options.into());
        let mut shape = Shape::default();
        data.sizes(&mut shape).map_err(|(left, right)| {
            Error::op("new", Why::sizes("the lengths of the rows", left, right), loc)
        })?;
        let mut elements = Vec::with_capacity(shape.checked_numel().unwrap_or(0));
        data.elements(&mut elements);
        let tensor = device::placed(Tensor::from_vec(elements, shape)?, options.device(), "new", loc)?;
        tensor.to_dtype(options.dtype_or(D::Element::DTYPE))
    }

    /// The size of a tensor of one dim; an error for another number of dims.
    #[track_caller]
    pub fn dims1(&self) -> Result<usize> {
        self.of_rank("dims1", Loc::caller()).map(|[a]| a)
    }

    /// Both sizes of a matrix; an error for another number of dims.
    ///
    /// ```
    /// # use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::zeros((2, 3), &Device::Cpu)?;
    /// let (rows, columns) = x.dims2()?;
    /// assert_eq!((rows, columns), (2, 3));
    /// assert!(x.dims3().unwrap_err().to_string().contains("x must have 3 dims, got 2"));
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn dims2(&self) -> Result<(usize, usize)> {
        self.of_rank("dims2", Loc::caller()).map(|[a, b]| (a, b))
    }

    /// The three sizes of a tensor; an error for another number of dims.
    #[track_caller]
    pub fn dims3(&self) -> Result<(usize, usize, usize)> {
        self.of_rank("dims3", Loc::caller()).map(|[a, b, c]| (a, b, c))
    }

    /// The four sizes of a tensor; an error for another number of dims.
    #[track_caller]
    pub fn dims4(&self) -> Result<(usize, usize, usize, usize)> {
        self.of_rank("dims4", Loc::caller()).map(|[a, b, c, d]| (a, b, c, d))
    }

    /// The five sizes of a tensor; an error for another number of dims.
    #[track_caller]
    pub fn dims5(&self) -> Result<(usize, usize, usize, usize, usize)> {
        self.of_rank("dims5", Loc::caller()).map(|[a, b, c, d, e]| (a, b, c, d, e))
    }

    /// The elements of a tensor of one dim.
    #[track_caller]
    pub fn to_vec1<T: Element>(&self) -> Result<Vec<T>> {
        let loc = Loc::caller();
        self.of_rank::<1>("to_vec1", loc)?;
        read_own(self, "to_vec1", loc)
    }

    /// The rows of a matrix.
    #[track_caller]
    pub fn to_vec2<T: Element>(&self) -> Result<Vec<Vec<T>>> {
        let loc = Loc::caller();
        let [rows, columns] = self.of_rank("to_vec2", loc)?;
        let all = read_own::<T>(self, "to_vec2", loc)?;
        let mut vectors = reserve(rows, "to_vec2", loc)?;
        vectors.extend((0..rows).map(|row| all[row * columns..(row + 1) * columns].to_vec()));
        Ok(vectors)
    }

    /// The matrices of a tensor of three dims, each as its rows.
    #[track_caller]
    pub fn to_vec3<T: Element>(&self) -> Result<Vec<Vec<Vec<T>>>> {
        let loc = Loc::caller();
        let [blocks, rows, columns] = self.of_rank("to_vec3", loc)?;
        let all = read_own::<T>(self, "to_vec3", loc)?;
        // Rows without elements cost memory, too.
        drop(reserve::<Vec<T>>(blocks.saturating_mul(rows.max(1)), "to_vec3", loc)?);
        let row = |at: usize| all[at * columns..(at + 1) * columns].to_vec();
        Ok((0..blocks).map(|block| (0..rows).map(|r| row(block * rows + r)).collect()).collect())
    }

    fn of_rank<const N: usize>(&self, op: &str, loc: Loc) -> Result<[usize; N]> {
        let shape = self.shape();
        <[usize; N]>::try_from(&shape[..]).map_err(|_| {
            let expected = ["0", "1", "2", "3", "4", "5"].get(N).copied().unwrap_or("other");
            let why = Why::Rank { argument: "x", expected, got: shape.rank() };
            self.refusal(op, why, loc)
        })
    }
}
