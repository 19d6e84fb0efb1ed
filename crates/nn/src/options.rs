//! Options of layers: the struct, its defaults and setters, written once.

/// Methods that set an option and give the options back: `Conv2d::options().bias(false)`.
macro_rules! setters {
    ($Options:ident$(<$L:ident>)? { $($(#[$doc:meta])* $field:ident: $Type:ty),* $(,)? }) => {
        impl$(<$L>)? $Options$(<$L>)? {
            $(
                $(#[$doc])*
                pub fn $field(mut self, $field: $Type) -> Self {
                    self.$field = $field;
                    self
                }
            )*

            /// The dtype of parameters and buffers; f32 by default.
            pub fn dtype(mut self, dtype: kiln_tensor::DType) -> Self {
                self.dtype = dtype;
                self
            }

            /// Where parameters and buffers live; on the CPU by default.
            pub fn device(mut self, device: &kiln_tensor::Device) -> Self {
                self.device = *device;
                self
            }
        }
    };
}
pub(crate) use setters;

/// A layer's options with their defaults and setters, and how the layer is made from its `build`.
macro_rules! options {
    ($(#[$doc:meta])* $Options:ident for $Layer:ident($($arg:ident: $Arg:ty),*) {
        $($(#[$field_doc:meta])* $field:ident: $Type:ty = $default:expr),* $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $Options {
            $($field: $Type,)*
            dtype: kiln_tensor::DType,
            device: kiln_tensor::Device,
        }

        impl Default for $Options {
            fn default() -> $Options {
                let (dtype, device) = (kiln_tensor::DType::F32, kiln_tensor::Device::Cpu);
                $Options { $($field: $default,)* dtype, device }
            }
        }

        $crate::options::setters!($Options { $($(#[$field_doc])* $field: $Type),* });

        impl $Layer {
            /// With default options.
            #[track_caller]
            pub fn new($($arg: $Arg),*) -> kiln_tensor::Result<$Layer> {
                $Layer::options().build($($arg),*)
            }

            /// Options, from which any number of layers can be built.
            pub fn options() -> $Options {
                $Options::default()
            }
        }
    };
}
pub(crate) use options;
