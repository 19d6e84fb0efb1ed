//! Models everybody knows, written as users write them: ResNet, MobileNetV2, EfficientNet, ConvNeXt, GPT-2, BERT, ViT.
//!
//! Parameters have the names of torchvision's (`resnet`, `mobilenet`, `efficientnet`, `convnext`, `vit`) and of Hugging
//! Face transformers' models (`gpt2`, `bert`), so their state dicts load as they are:
//!
//! ```no_run
//! use kiln_models::{Gpt2, Gpt2Config, resnet18};
//! use kiln_nn::{Module, safetensors, torch_file};
//! # fn main() -> kiln_tensor::Result<()> {
//! let images = resnet18(1000)?;
//! images.load_state_dict(&torch_file::load("resnet18-f37072fd.pth")?, true)?;
//!
//! let language = Gpt2::new(Gpt2Config::small())?;
//! language.load_state_dict(&torch_file::load("gpt2.pt")?, true)?; // torch.save(model.state_dict(), "gpt2.pt")
//! // The file of the hub has neither the prefix of the language model nor the head, which is the table of words.
//! language.transformer.load_state_dict(&safetensors::load("model.safetensors")?, false)?;
//! # Ok(()) }
//! ```
//!
//! New models are drawn as theirs are. This crate knows nothing of the compiler: models are captured like any
//! user's.

pub mod bert;
pub mod convnext;
pub mod efficientnet;
pub mod gpt2;
mod inverted;
pub mod mobilenet;
pub mod resnet;
pub mod vit;

pub use bert::{Bert, BertConfig, BertForMaskedLm, BertForSequenceClassification, BertInput, BertOutput};
pub use convnext::{ConvNeXt, ConvNeXtConfig, convnext_tiny};
pub use efficientnet::{EfficientNet, EfficientNetConfig, efficientnet_b0};
pub use gpt2::{Gpt2, Gpt2Config, Gpt2Model, KvCache};
pub use mobilenet::{MobileNetV2, MobileNetV2Config, mobilenet_v2};
pub use resnet::{BasicBlock, Bottleneck, ResNet, ResNetBlock, resnet18, resnet34, resnet50};
pub use vit::{ViT, ViTConfig, vit_b_16};
