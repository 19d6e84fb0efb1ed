//! `compile(f)`: wraps functions of up to four arguments; the result is called like the function.

use std::ops::Deref;

use kiln_ir::{Error, Result};

use crate::explain::Explanation;
use crate::options::Compile;
use crate::region::Region;

/// A compiled function. Call it like the function it wraps.
///
/// ```
/// use kiln_dynamo::compile;
/// use kiln_tensor::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// let f = compile(|x: &Tensor, y: &Tensor| (x * y + 1.0).tanh().ok());
/// let x = Tensor::ones([3], &Device::Cpu)?;
/// assert_eq!(f(&x, &x)?.to_vec::<f32>()?, [2f32.tanh(); 3]);
/// println!("{}", f.explain());
/// # Ok(()) }
/// ```
pub struct Compiled<F: ?Sized> {
    region: Region,
    call: Box<F>,
}

impl<F: ?Sized> Compiled<F> {
    /// What was captured, compiled and refused so far.
    pub fn explain(&self) -> Explanation {
        self.region.explain()
    }

    /// The region behind it.
    pub fn region(&self) -> &Region {
        &self.region
    }
}

impl<F: ?Sized> Deref for Compiled<F> {
    type Target = F;
    fn deref(&self) -> &F {
        &self.call
    }
}

/// A function that can be compiled; `Args` tells apart the numbers of arguments.
pub trait Compilable<'a, Args> {
    /// The function as a trait object, which calls go to.
    type Dyn: ?Sized;
    /// Puts the function behind a region.
    fn wrap(self, region: Region) -> Box<Self::Dyn>;
}

impl<'a, F, T, E> Compilable<'a, ()> for F
where
    F: Fn() -> Result<T, E> + 'a,
    E: From<Error> + 'a,
    T: 'a,
{
    type Dyn = dyn Fn() -> Result<T, E> + 'a;
    fn wrap(self, region: Region) -> Box<Self::Dyn> {
        Box::new(move || region.run(&self))
    }
}

macro_rules! compilable {
    ($($arg:ident $A:ident),*) => {
        impl<'a, F, T, Err, $($A: ?Sized + 'a),*> Compilable<'a, ($(&'a $A,)*)> for F
        where
            F: Fn($(&$A),*) -> Result<T, Err> + 'a,
            Err: From<Error> + 'a,
            T: 'a,
        {
            type Dyn = dyn Fn($(&$A),*) -> Result<T, Err> + 'a;
            fn wrap(self, region: Region) -> Box<Self::Dyn> {
                Box::new(move |$($arg: &$A),*| region.run(|| self($($arg),*)))
            }
        }
    };
}
compilable!(a A);
compilable!(a A, b B);
compilable!(a A, b B, c C);
compilable!(a A, b B, c C, d D);

/// Compiles a function of up to four borrowed arguments with the default options.
pub fn compile<'a, Args, F: Compilable<'a, Args>>(function: F) -> Compiled<F::Dyn> {
    Compile::new().function(function)
}

impl Compile {
    /// Compiles a function of up to four borrowed arguments.
    pub fn function<'a, Args, F: Compilable<'a, Args>>(self, function: F) -> Compiled<F::Dyn> {
        let region = self.region();
        Compiled { call: function.wrap(region.clone()), region }
    }
}
