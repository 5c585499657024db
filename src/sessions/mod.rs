//! Whose turn is this: the conversation a request belongs to, found in its headers, its body and its beginning.
//!
//! A *group* is the id a request carries ([`Identity`]); a *lane* is one growing prompt inside it. Pins, turns and
//! residency belong to the lane. [`Registry::begin`] places a request, [`Registry::commit`] learns from its answer.

mod class;
mod estimate;
mod headers;
mod hints;
mod id;
pub mod identify;
mod identity;
mod lane;
mod line;
mod lineage;
mod measure;
mod minted;
mod place;
mod registry;
mod request;
mod slots;
mod store;
mod tails;
#[cfg(test)]
mod tests;
mod turn;

pub use class::{Class, Declared};
pub use headers::Headers;
pub use hints::Samples;
pub use identity::{Identity, Strength, is_codex};
pub use place::EPHEMERAL_BYTES;
pub use registry::{Limits, Registry};
pub use request::{Lookup, Request, credential};
pub use turn::{Answer, How, Incoming, Stateful, Turn};
