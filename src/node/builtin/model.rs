//! The fake model: deterministic, and honest about its KV.
//!
//! The KV of a block is a function of the *stored bytes* of the block before it and of its own tokens, and the
//! next token is a function of all KV bytes held. So a wrong, missing or stale block anywhere changes the text.

use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

use crate::core::types::Tokens;
use crate::prompt::{BLOCK_BYTES, BLOCK_TOKENS, BYTES_PER_TOKEN};

/// Bytes of one KV block. Shared, never changed.
pub type KvBytes = Arc<[u8]>;

/// Shortest natural answer, in tokens.
const MIN_OUTPUT: u64 = 16;
/// How much longer an answer may be.
const OUTPUT_SPREAD: u64 = 185;

/// Computes KV blocks of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model {
    /// KV bytes per token, ≥ 1.
    pub kv_bytes_per_token: u32,
}

impl Default for Model {
    fn default() -> Self {
        Self { kv_bytes_per_token: 64 }
    }
}

impl Model {
    /// KV bytes of one block.
    pub const fn block_bytes(&self) -> usize {
        self.kv_bytes_per_token as usize * BLOCK_TOKENS
    }

    /// The KV of a block of tokens behind `previous`.
    pub fn block(&self, previous: Option<&KvBytes>, tokens: &[u8]) -> KvBytes {
        let before = previous.map_or(0, |kv| xxh3_64(kv));
        let mut state = xxh3_64_with_seed(tokens, before);
        let mut kv = Vec::with_capacity(self.block_bytes() + 8);
        while kv.len() < self.block_bytes() {
            kv.extend_from_slice(&split_mix(&mut state).to_le_bytes());
        }
        kv.truncate(self.block_bytes());
        kv.into()
    }

    /// The KV of the whole blocks of `text` behind those already there.
    pub fn blocks(&self, mut previous: Option<KvBytes>, text: &[u8]) -> Vec<KvBytes> {
        text.chunks_exact(BLOCK_BYTES)
            .map(|tokens| {
                let kv = self.block(previous.as_ref(), tokens);
                previous = Some(kv.clone());
                kv
            })
            .collect()
    }
}

/// How long the answer to `prompt` is, in tokens: a function of the prompt, cut to what was asked for. ≥ 1.
pub fn output_tokens(prompt: &[u8], asked: Option<Tokens>) -> Tokens {
    let natural = MIN_OUTPUT + xxh3_64(prompt) % OUTPUT_SPREAD;
    natural.min(asked.unwrap_or(natural)).max(1)
}

/// Bytes as tokens; the last token may be short.
pub const fn tokens(bytes: usize) -> Tokens {
    bytes.div_ceil(BYTES_PER_TOKEN) as Tokens
}

/// Chooses tokens one after another.
#[derive(Debug, Clone, Copy)]
pub struct Sampler {
    state: u64,
}

impl Sampler {
    /// Reads all KV held, block by block, and the tokens that have no whole block yet.
    pub fn new<'a>(held: impl Iterator<Item = &'a [u8]>, tail: &[u8]) -> Self {
        let mut kv = Xxh3::new();
        held.for_each(|block| kv.update(block));
        Self { state: xxh3_64_with_seed(tail, kv.digest()) }
    }

    /// Goes over tokens that were chosen already.
    pub fn skip(&mut self, chosen: &[u8]) {
        for token in chosen.chunks(BYTES_PER_TOKEN) {
            split_mix(&mut self.state);
            self.state = xxh3_64_with_seed(token, self.state);
        }
    }

    /// The next token: four ASCII bytes, a syllable and a space (a full stop for the last one).
    pub fn token(&mut self, last: bool) -> [u8; BYTES_PER_TOKEN] {
        let draw = split_mix(&mut self.state);
        let pick = |from: &[u8], shift: u32| from[(draw >> shift) as usize % from.len()];
        let token = [
            pick(b"bcdfghjklmnprstvwz", 0),
            pick(b"aeiou", 16),
            pick(b"bdgklmnprstx", 32),
            if last { b'.' } else { b' ' },
        ];
        self.state = xxh3_64_with_seed(&token, self.state);
        token
    }
}

/// splitmix64: the next number, and the state after it.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(held: &[KvBytes], tail: &[u8]) -> Vec<u8> {
        let mut sampler = Sampler::new(held.iter().map(|b| &**b), tail);
        (0..8).flat_map(|i| sampler.token(i == 7)).collect()
    }

    #[test]
    fn one_wrong_byte_in_one_block_changes_the_text() {
        let model = Model::default();
        let prompt = vec![b'x'; BLOCK_BYTES * 5 + 10];
        let held = model.blocks(None, &prompt);
        assert_eq!((held.len(), held[0].len()), (5, 1536));
        let right = text(&held, &prompt[BLOCK_BYTES * 5..]);
        for block in 0..5 {
            let mut wrong = held.clone();
            let mut bytes = wrong[block].to_vec();
            bytes[block] ^= 1;
            wrong[block] = bytes.into();
            assert_ne!(text(&wrong, &prompt[BLOCK_BYTES * 5..]), right);
            // What is computed behind a wrong block is wrong too.
            let behind = model.blocks(Some(wrong[block].clone()), &prompt[(block + 1) * BLOCK_BYTES..]);
            assert!(behind.iter().zip(&held[block + 1..]).all(|(a, b)| a != b));
        }
        assert_ne!(text(&held[..4], &prompt[BLOCK_BYTES * 5..]), right);
        assert_ne!(text(&held, b"other"), right);
    }

    #[test]
    fn tokens_are_four_plain_bytes() {
        let out = text(&[], b"");
        assert_eq!(out.len(), 32);
        assert!(out.iter().all(|b| b.is_ascii_lowercase() || *b == b' ' || *b == b'.'));
        assert_eq!(out.last(), Some(&b'.'));
    }

    #[test]
    fn an_answer_goes_on_as_it_began() {
        let whole = text(&[], b"prompt");
        let mut sampler = Sampler::new(std::iter::empty(), b"prompt");
        sampler.skip(&whole[..12]);
        let rest: Vec<u8> = (3..8).flat_map(|i| sampler.token(i == 7)).collect();
        assert_eq!(rest, whole[12..]);
    }

    #[test]
    fn output_length_is_bounded_by_what_was_asked() {
        let natural = output_tokens(b"p", None);
        assert!((16..=200).contains(&natural));
        assert_eq!(output_tokens(b"p", Some(7)), 7);
        assert_eq!(output_tokens(b"p", Some(0)), 1);
        assert_eq!(output_tokens(b"p", Some(1_000_000)), natural);
    }
}
