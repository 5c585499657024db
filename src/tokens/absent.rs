//! In a build without the feature `tokens`: nothing is counted exactly.

use std::path::Path;
use std::sync::Arc;

use crate::core::types::{BlockHash, SessionId, Tokens};

/// Never made.
#[derive(Debug)]
pub enum Exact {}

/// Never made.
#[derive(Debug, Clone)]
pub struct Counted {
    /// `H`.
    pub chain: Arc<[BlockHash]>,
    /// The prompt's length.
    pub input_len: Tokens,
    /// What is not held of it.
    pub append_len: Tokens,
}

impl Exact {
    /// Says that this build cannot.
    ///
    /// # Errors
    /// Always.
    pub fn load(_: &Path, _: Option<&Path>) -> Result<Self, String> {
        Err("this build has no tokenizer (cargo feature `tokens`)".into())
    }

    /// Never called.
    pub fn count(&self, _: Option<&SessionId>, _: &str, _: &[u8]) -> Option<Counted> {
        match *self {}
    }

    /// Never called.
    pub fn commit(&self, _: &SessionId, _: &Counted, _: Option<Tokens>, _: Option<Tokens>) {
        match *self {}
    }
}
