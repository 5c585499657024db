//! The hash chain over canonical bytes: equal hashes mean equal prefixes.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::core::types::BlockHash;

/// Byte mode's nominal size of a token. Block boundaries never depend on a learned ratio.
pub const BYTES_PER_TOKEN: usize = 4;
/// Tokens in a block.
pub const BLOCK_TOKENS: usize = 24;
/// Canonical bytes in a block.
pub const BLOCK_BYTES: usize = BLOCK_TOKENS * BYTES_PER_TOKEN;

/// Where a chain stands: what it needs to go on, without the hashes already made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainState {
    last: u64,
    bytes: u64,
    tail: [u8; BLOCK_BYTES],
}

impl ChainState {
    /// The root of a model's chains: two models never share a block.
    pub fn root(model: &str) -> Self {
        Self { last: xxh3_64_with_seed(model.as_bytes(), 0x6b76_6321), bytes: 0, tail: [0; BLOCK_BYTES] }
    }

    /// Canonical bytes so far, the unfinished block included.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whole blocks so far.
    pub const fn blocks(&self) -> usize {
        self.bytes as usize / BLOCK_BYTES
    }

    /// A digest of everything so far, the unfinished block included; it costs one short hash.
    pub fn digest(&self) -> u64 {
        digest_of(&self.tail[..self.tail_len()], self.last)
    }

    /// The hash of the last whole block (or the root), which seeds what follows.
    pub(crate) const fn digest_seed(&self) -> u64 {
        self.last
    }

    /// Appends canonical bytes; every block they complete adds its hash to `hashes`.
    pub fn extend(&mut self, hashes: &mut Vec<BlockHash>, mut bytes: &[u8]) {
        let held = self.tail_len();
        self.bytes += bytes.len() as u64;
        if held > 0 {
            let take = bytes.len().min(BLOCK_BYTES - held);
            self.tail[held..held + take].copy_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if held + take < BLOCK_BYTES {
                return;
            }
            self.last = block(&self.tail, self.last);
            hashes.push(BlockHash(self.last));
        }
        let (blocks, rest) = bytes.as_chunks::<BLOCK_BYTES>();
        for whole in blocks {
            self.last = block(whole, self.last);
            hashes.push(BlockHash(self.last));
        }
        self.tail[..rest.len()].copy_from_slice(rest);
        // A state compares by value, so nothing of an older block may stay behind the tail.
        self.tail[rest.len()..].fill(0);
    }

    const fn tail_len(&self) -> usize {
        self.bytes as usize % BLOCK_BYTES
    }
}

/// The previous hash seeds the next, so each hash covers everything before it.
fn block(bytes: &[u8; BLOCK_BYTES], previous: u64) -> u64 {
    xxh3_64_with_seed(bytes, previous)
}

/// The digest of a prefix: its unfinished block after the hash of the last whole one.
pub(crate) fn digest_of(tail: &[u8], last: u64) -> u64 {
    xxh3_64_with_seed(tail, last)
}

/// The block hashes of a whole canonical text.
pub fn chain(model: &str, canonical: &[u8]) -> Vec<BlockHash> {
    let mut hashes = Vec::with_capacity(canonical.len() / BLOCK_BYTES);
    ChainState::root(model).extend(&mut hashes, canonical);
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_do_not_matter(bytes in proptest::collection::vec(any::<u8>(), 0..700), cut in 0usize..700) {
            let cut = cut.min(bytes.len());
            let whole = chain("m", &bytes);
            let (mut state, mut hashes) = (ChainState::root("m"), Vec::new());
            state.extend(&mut hashes, &bytes[..cut]);
            prop_assert_eq!(&whole[..hashes.len()], &hashes[..]);
            state.extend(&mut hashes, &bytes[cut..]);
            prop_assert_eq!(&whole, &hashes);
            let mut once = ChainState::root("m");
            once.extend(&mut Vec::new(), &bytes);
            prop_assert_eq!(once.digest(), state.digest());
        }
    }

    #[test]
    fn models_share_nothing_and_a_change_reaches_every_later_block() {
        let bytes = [7u8; 960];
        let mut other = bytes;
        other[0] = 8;
        let (a, b, c) = (chain("a", &bytes), chain("b", &bytes), chain("a", &other));
        assert_eq!(a.len(), 10);
        assert!(a.iter().zip(&b).all(|(x, y)| x != y));
        assert!(a.iter().zip(&c).all(|(x, y)| x != y));
    }
}
