//! `compile(f)`: wraps functions of up to four arguments; the result is called like the function.

use std::marker::PhantomData;
use std::ops::Deref;

use kiln_ir::Result;

use crate::explain::Explanation;
use crate::options::Compile;
use crate::region::Region;

/// A compiled function. Call it like the function it wraps; send it to other threads, and share it with them, where
/// that function may be. To name its type, as the field of a struct must, [box](Compiled::boxed) it.
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
pub struct Compiled<F: ?Sized, W = Box<F>> {
    region: Region,
    wrapped: W,
    called_as: PhantomData<fn(&F)>,
}

/// What can be called as `F`, a `dyn Fn`. It keeps its own type, and with it whether it is `Send` and `Sync`.
pub trait Callable<F: ?Sized> {
    /// To be called.
    fn function(&self) -> &F;
    /// Without its own type.
    fn boxed(self) -> Box<F>;
}

impl<F: ?Sized> Callable<F> for Box<F> {
    fn function(&self) -> &F {
        self
    }
    fn boxed(self) -> Box<F> {
        self
    }
}

/// A closure that calls the user's function behind a region.
struct Wrapped<F>(F);

impl<F: ?Sized, W: Callable<F>> Compiled<F, W> {
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
        self.wrapped.function().call(args)
    }

    /// The compiled function as a type that has a name.
    ///
    /// ```
    /// use kiln_dynamo::{Compiled, compile};
    /// use kiln_tensor::{Result, Tensor};
    ///
    /// struct Model {
    ///     double: Compiled<dyn Fn(&Tensor) -> Result<Tensor>>,
    /// }
    /// let model = Model { double: compile(|x: &Tensor| x.mul(2.0)).boxed() };
    /// assert_eq!((model.double)(&Tensor::from_slice(&[1.0f32, 2.0])?)?.to_vec::<f32>()?, [2.0, 4.0]);
    /// # Ok::<(), kiln_tensor::Error>(())
    /// ```
    pub fn boxed(self) -> Compiled<F> {
        Compiled { region: self.region, wrapped: self.wrapped.boxed(), called_as: PhantomData }
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

impl<F: ?Sized, W: Callable<F>> Deref for Compiled<F, W> {
    type Target = F;
    #[inline]
    fn deref(&self) -> &F {
        self.wrapped.function()
    }
}

/// A function that can be compiled; `Args` distinguishes the number of arguments.
pub trait Compilable<'a, Args> {
    /// The function as a trait object, which calls go to.
    type Dyn: ?Sized;
    /// Puts the function behind a region.
    fn wrap(self, region: Region) -> impl Callable<Self::Dyn>;
}

// Of one error type: with any that `kiln::Error` converts to, `Ok(y)` at the end of a closure would say too little.
macro_rules! compilable {
    ($($arg:ident $A:ident),*) => {
        impl<'a, F, T, $($A: ?Sized + 'a),*> Callable<dyn Fn($(&$A),*) -> Result<T> + 'a> for Wrapped<F>
        where
            F: Fn($(&$A),*) -> Result<T> + 'a,
            T: 'a,
        {
            #[inline]
            fn function(&self) -> &(dyn Fn($(&$A),*) -> Result<T> + 'a) {
                &self.0
            }
            fn boxed(self) -> Box<dyn Fn($(&$A),*) -> Result<T> + 'a> {
                Box::new(self.0)
            }
        }

        impl<'a, F, T, $($A: ?Sized + 'a),*> Compilable<'a, ($(&'a $A,)*)> for F
        where
            F: Fn($(&$A),*) -> Result<T> + 'a,
            T: 'a,
        {
            type Dyn = dyn Fn($(&$A),*) -> Result<T> + 'a;
            fn wrap(self, region: Region) -> impl Callable<Self::Dyn> {
                Wrapped(move |$($arg: &$A),*| region.run(|| self($($arg),*)))
            }
        }

        impl<'a, 'b, T, $($A: ?Sized),*> Call<($(&'b $A,)*)> for dyn Fn($(&$A),*) -> Result<T> + 'a {
            fn call(&self, ($($arg,)*): ($(&'b $A,)*)) -> Result<()> {
                self($($arg),*).map(drop)
            }
        }
    };
}
compilable!();
compilable!(a A);
compilable!(a A, b B);
compilable!(a A, b B, c C);
compilable!(a A, b B, c C, d D);

/// Compiles a function of up to four borrowed arguments with the default options.
pub fn compile<'a, Args, F: Compilable<'a, Args>>(function: F) -> Compiled<F::Dyn, impl Callable<F::Dyn>> {
    Compile::new().function(function)
}

impl Compile {
    /// Compiles a function of up to four borrowed arguments.
    pub fn function<'a, Args, F: Compilable<'a, Args>>(
        self,
        function: F,
    ) -> Compiled<F::Dyn, impl Callable<F::Dyn>> {
        let region = self.region();
        Compiled { wrapped: function.wrap(region.clone()), region, called_as: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_tensor::Tensor;

    /// A function that is `Send` and `Sync` is so compiled; this test is one for the compiler.
    #[test]
    fn what_may_go_to_other_threads_may_go_there_compiled() -> Result<()> {
        fn goes<T: Send + Sync>(value: T) -> T {
            value
        }
        let factor = Tensor::from_slice(&[2.0f32, 3.0])?;
        let double = goes(compile(|x: &Tensor| x.mul(&factor)));
        let both = goes(Compile::new().function(|x: &Tensor, y: &Tensor| x.add(y)));
        let none = goes(compile(|| factor.sum()));
        let x = Tensor::from_slice(&[1.0f32, 1.0])?;
        let sum = std::thread::scope(|scope| {
            let there = scope.spawn(|| both(&double(&x)?, &x)?.sum()?.add(&none()?)?.item::<f32>());
            there.join().expect("no panic")
        })?;
        assert_eq!(sum, 12.0);
        // One that is neither is compiled, too.
        let count = std::cell::Cell::new(0);
        let counts = compile(|x: &Tensor| {
            count.set(count.get() + 1);
            x.mul(2.0)
        });
        counts(&x)?;
        assert_eq!(count.get(), 1);
        Ok(())
    }
}
