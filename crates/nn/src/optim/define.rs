//! Optimizers defined by their options: structs, setters, what a state dict keeps, and the trait's methods.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::Result;

/// An option that a state dict keeps.
pub(super) enum Setting<'a> {
    Number(&'a mut f64),
    Flag(&'a mut bool),
}

impl Setting<'_> {
    pub(super) fn get(&self) -> f64 {
        match self {
            Setting::Number(number) => **number,
            Setting::Flag(flag) => f64::from(u8::from(**flag)),
        }
    }

    pub(super) fn set(self, value: f64) {
        match self {
            Setting::Number(number) => *number = value,
            Setting::Flag(flag) => *flag = value != 0.0,
        }
    }
}

/// An option that is not what it must be.
pub(super) fn check_number(
    optimizer: &str,
    argument: &'static str,
    expected: &'static str,
    got: f64,
    holds: bool,
    loc: Loc,
) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::op(optimizer, Why::Number { argument, expected, got }, loc)) }
}

/// Options that must not be negative, in the order in which they are checked.
pub(super) fn check_not_negative<const N: usize>(
    optimizer: &str,
    options: [(&'static str, f64); N],
    loc: Loc,
) -> Result<()> {
    options
        .into_iter()
        .try_for_each(|(argument, got)| check_number(optimizer, argument, "0 or more", got, got >= 0.0, loc))
}

/// The parts that are the same for every optimizer: making one, and the trait.
macro_rules! optimizer {
    ($Optimizer:ident, $Options:ident, $name:literal) => {
        impl $Optimizer {
            #[doc = concat!($name, " with default options for these parameters.")]
            #[track_caller]
            pub fn new(parameters: Vec<Tensor>, lr: f64) -> Result<$Optimizer> {
                $Optimizer::options().lr(lr).build(parameters)
            }

            /// The default options.
            pub fn options() -> $Options {
                $Options::default()
            }

            /// For several groups of parameters, each with its own options.
            #[track_caller]
            pub fn from_groups(groups: impl IntoIterator<Item = ParamGroup<$Options>>) -> Result<$Optimizer> {
                let groups =
                    groups.into_iter().map(|group| ParamGroup::new(group.parameters, group.options.0));
                Ok($Optimizer { groups: Groups::new(groups.collect(), $name, Loc::caller())? })
            }

            /// Adds a group of parameters.
            #[track_caller]
            pub fn add_param_group(&self, group: ParamGroup<$Options>) -> Result<()> {
                self.groups.add(ParamGroup::new(group.parameters, group.options.0), Loc::caller())
            }
        }

        impl $Options {
            /// The optimizer for these parameters.
            #[track_caller]
            pub fn build(&self, parameters: Vec<Tensor>) -> Result<$Optimizer> {
                $Optimizer::from_groups([ParamGroup::new(parameters, self.clone())])
            }
        }

        impl $crate::optim::Optimizer for $Optimizer {
            #[track_caller]
            fn step(&self) -> Result<()> {
                let _behalf = Loc::caller().on_behalf($crate::folder());
                self.groups.step()
            }
            fn parameters(&self) -> Vec<Tensor> {
                self.groups.parameters()
            }
            fn zero_grad(&self) {
                self.groups.zero_grad();
            }
            fn lrs(&self) -> Vec<f64> {
                self.groups.lrs()
            }
            fn set_lrs(&self, lrs: &[f64]) {
                self.groups.set_lrs(lrs);
            }
            fn set_lr(&self, lr: f64) {
                self.groups.set_lr(lr);
            }
            fn initial_lrs(&self) -> Vec<f64> {
                self.groups.initial_lrs()
            }
            fn set_initial_lrs(&self, lrs: &[f64]) {
                self.groups.set_initial_lrs(lrs);
            }
            fn momenta(&self) -> Vec<f64> {
                self.groups.momenta()
            }
            fn set_momenta(&self, momenta: &[f64]) {
                self.groups.set_momenta(momenta);
            }
            fn state_dict(&self) -> Result<$crate::StateDict> {
                self.groups.state_dict()
            }
            #[track_caller]
            fn load_state_dict(&self, state: &$crate::StateDict) -> Result<()> {
                self.groups.load_state_dict(state, Loc::caller())
            }
        }
    };
}
pub(super) use optimizer;

/// What an option is in a state dict.
pub(super) trait Kept {
    fn kept(&mut self) -> Setting<'_>;
}

impl Kept for f64 {
    fn kept(&mut self) -> Setting<'_> {
        Setting::Number(self)
    }
}

impl Kept for bool {
    fn kept(&mut self) -> Setting<'_> {
        Setting::Flag(self)
    }
}

/// An optimizer and its options: structs, defaults, setters, and the list for state dicts.
macro_rules! settings {
    ($(#[$doc:meta])* $Optimizer:ident, $Options:ident, $name:literal,
        $(betas: ($beta1:literal, $beta2:literal),)?
        { $($(#[$field_doc:meta])* $field:ident: $Type:ty = $default:expr),* $(,)? }) => {
        $(#[$doc])*
        pub struct $Optimizer {
            groups: Groups<Settings>,
        }

        #[doc = concat!("The options of [`", $name, "`], with PyTorch's names and defaults.")]
        #[derive(Clone, Debug, Default)]
        pub struct $Options(Settings);

        #[derive(Clone, Debug)]
        struct Settings {
            $($field: $Type,)*
            $(betas: $crate::optim::define::betas!($beta1),)?
        }

        impl Default for Settings {
            fn default() -> Settings {
                Settings { $($field: $default,)* $(betas: ($beta1, $beta2),)? }
            }
        }

        impl $crate::optim::group::Options for Settings {
            fn name(&self) -> &'static str {
                $name
            }

            fn lr(&mut self) -> &mut f64 {
                &mut self.lr
            }

            fn options(&mut self) -> Vec<(&'static str, $crate::optim::define::Setting<'_>)> {
                use $crate::optim::define::Kept;
                vec![
                    $((stringify!($field), self.$field.kept()),)*
                    $(
                        ({ let _ = $beta1; "betas.0" }, self.betas.0.kept()),
                        ("betas.1", self.betas.1.kept()),
                    )?
                ]
            }
        }

        impl $Options {
            $(
                $(#[$field_doc])*
                pub fn $field(mut self, $field: $Type) -> $Options {
                    self.0.$field = $field;
                    self
                }
            )*
            $(
                #[doc = concat!(
                    "How much the running averages of the gradient and of its size keep; (",
                    stringify!($beta1), ", ", stringify!($beta2), ") by default."
                )]
                pub fn betas(mut self, beta1: f64, beta2: f64) -> $Options {
                    (self.0.betas.0, self.0.betas.1) = (beta1, beta2);
                    self
                }
            )?
        }

        optimizer!($Optimizer, $Options, $name);
    };
}
pub(super) use settings;

/// The type of betas, where there are any: a repetition needs to name what it repeats for.
macro_rules! betas {
    ($beta:literal) => {
        (f64, f64)
    };
}
pub(super) use betas;

/// Betas that are not shares.
pub(super) fn check_betas(optimizer: &str, (beta1, beta2): (f64, f64), loc: Loc) -> Result<()> {
    for (argument, got) in [("betas.0", beta1), ("betas.1", beta2)] {
        check_number(optimizer, argument, "0 or more and less than 1", got, (0.0..1.0).contains(&got), loc)?;
    }
    Ok(())
}
