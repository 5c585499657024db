//! The chain of block hashes over token ids.

use crate::core::types::BlockHash;
use crate::prompt::{BYTES_PER_TOKEN, ChainState};

/// Where a chain over token ids stands. Copies are cheap (112 bytes): a reader of an engine's KV events keeps one for
/// each block the engine names, extends it by the ids of the block stored behind, and so knows which of our blocks
/// that completes, whatever the engine's block size.
///
/// ```
/// use kvc_router::tokens::TokenChain;
/// let ids: Vec<u32> = (0..100).collect();
/// let (mut whole, mut hashes) = (TokenChain::root("model"), Vec::new());
/// whole.extend(&mut hashes, &ids);
/// // An engine with blocks of 16 tokens stores them one by one.
/// let (mut parent, mut seen) = (TokenChain::root("model"), Vec::new());
/// ids.chunks(16).for_each(|block| parent.extend(&mut seen, block));
/// assert_eq!((hashes.len(), hashes), (100 / 24, seen));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenChain(ChainState);

impl TokenChain {
    /// The root of a model's chains.
    pub fn root(model: &str) -> Self {
        Self(ChainState::root(model))
    }

    /// Appends token ids; every block they complete adds its hash to `hashes`.
    pub fn extend(&mut self, hashes: &mut Vec<BlockHash>, ids: &[u32]) {
        // A token counts four bytes here too, so that both modes share blocks, states and counts.
        let mut bytes = [0; 256 * BYTES_PER_TOKEN];
        for some in ids.chunks(256) {
            for (place, id) in bytes.chunks_exact_mut(BYTES_PER_TOKEN).zip(some) {
                place.copy_from_slice(&id.to_le_bytes());
            }
            self.0.extend(hashes, &bytes[..some.len() * BYTES_PER_TOKEN]);
        }
    }

    /// Tokens so far.
    pub const fn tokens(&self) -> u64 {
        self.0.bytes() / BYTES_PER_TOKEN as u64
    }

    /// Whole blocks so far.
    pub const fn blocks(&self) -> usize {
        self.0.blocks()
    }
}
