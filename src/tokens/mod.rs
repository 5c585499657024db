//! Exact tokens: a prompt as the engine's own chat template and tokenizer make it (`sessions.tokens = "tokens"`).
//!
//! Only what a lane's prompt does not share with the one before is tokenised, and the result is the same as
//! tokenising everything: a text may be cut where a special token begins (`Tokenizer::cuts`). A template that is
//! not prefix-stable (it drops the reasoning of earlier turns, say) rewrites the middle of its own text; then what
//! is shared ends there, and the rest is tokenised anew.
//!
//! [`TokenChain`] hashes token ids into the same blocks, for the events in which engines name theirs.

#[cfg(not(feature = "tokens"))]
mod absent;
mod chain;
#[cfg(feature = "tokens")]
mod lanes;
#[cfg(feature = "tokens")]
mod template;
#[cfg(all(test, feature = "tokens"))]
mod tests;
#[cfg(feature = "tokens")]
mod text;
#[cfg(feature = "tokens")]
mod tokenizer;

#[cfg(not(feature = "tokens"))]
pub use absent::{Counted, Exact};
pub use chain::TokenChain;
#[cfg(feature = "tokens")]
pub use lanes::{Counted, Exact};
#[cfg(feature = "tokens")]
pub use template::Template;
#[cfg(feature = "tokens")]
pub use tokenizer::Tokenizer;
