//! `compile(f)`: wraps functions of up to four arguments; the result is called like the function.

use std::ops::Deref;

use kiln_ir::Result;

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

    /// Calls the function once with these arguments, a tuple of references, so that it is compiled before it is
    /// needed, and drops the result. Side effects stay: warming up a training step makes a step.
    ///
    /// ```
    /// use kiln_tensor::{Result, Tensor};
    /// # fn main() -> Result<()> {
    /// let f = kiln_dynamo::compile(|x: &Tensor, y: &Tensor| x.add(y)?.exp());
    /// let x = Tensor::from_slice(&[1.0f32, 2.0])?;
    /// f.warm_up((&x, &x))?;
    /// assert_eq!(f.explain().graphs.len(), 1);
    /// # Ok(()) }
    /// ```
    pub fn warm_up<Args>(&self, args: Args) -> Result<()>
    where
        F: Call<Args>,
    {
        self.call.call(args)
    }

    /// Forgets all recordings, so the next call compiles again.
    pub fn reset(&self) {
        self.region.reset();
    }
}

/// A function that can be called with a tuple of arguments: see [`Compiled::warm_up`].
pub trait Call<Args> {
    /// Calls the function and drops its result.
    fn call(&self, args: Args) -> Result<()>;
}

impl<'a, T> Call<()> for dyn Fn() -> Result<T> + 'a {
    fn call(&self, (): ()) -> Result<()> {
        self().map(drop)
    }
}

impl<F: ?Sized> Deref for Compiled<F> {
    type Target = F;
    fn deref(&self) -> &F {
        &self.call
    }
}

/// A function that can be compiled; `Args` distinguishes the number of arguments.
pub trait Compilable<'a, Args> {
    /// The function as a trait object, which calls go to.
    type Dyn: ?Sized;
    /// Puts the function behind a region.
    fn wrap(self, region: Region) -> Box<Self::Dyn>;
}

// Of one error type: with any that `kiln::Error` converts to, `Ok(y)` at the end of a closure would say too little.
impl<'a, F, T> Compilable<'a, ()> for F
where
    F: Fn() -> Result<T> + 'a,
    T: 'a,
{
    type Dyn = dyn Fn() -> Result<T> + 'a;
    fn wrap(self, region: Region) -> Box<Self::Dyn> {
        Box::new(move || region.run(&self))
    }
}

macro_rules! compilable {
    ($($arg:ident $A:ident),*) => {
        impl<'a, F, T, $($A: ?Sized + 'a),*> Compilable<'a, ($(&'a $A,)*)> for F
        where
            F: Fn($(&$A),*) -> Result<T> + 'a,
            T: 'a,
        {
            type Dyn = dyn Fn($(&$A),*) -> Result<T> + 'a;
            fn wrap(self, region: Region) -> Box<Self::Dyn> {
                Box::new(move |$($arg: &$A),*| region.run(|| self($($arg),*)))
            }
        }

        impl<'a, 'b, T, $($A: ?Sized),*> Call<($(&'b $A,)*)> for dyn Fn($(&$A),*) -> Result<T> + 'a {
            fn call(&self, ($($arg,)*): ($(&'b $A,)*)) -> Result<()> {
                self($($arg),*).map(drop)
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
