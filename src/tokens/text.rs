//! A text that grows, tokenised once.

use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::chain::TokenChain;
use super::tokenizer::Tokenizer;
use crate::core::types::BlockHash;

/// Cuts kept next to each other at the end of a text.
const NEAR: usize = 8;
/// Cuts kept at most: behind the near ones, each is twice as far from the end.
const KEPT: usize = 20;

/// A place from which a text that begins the same can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    at: usize,
    /// Of the text up to here and as far behind as decides about the cut.
    digest: u64,
    chain: TokenChain,
}

/// A tokenised text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Text {
    marks: Vec<Mark>,
    /// The hash of every whole block.
    pub hashes: Arc<[BlockHash]>,
    /// Where the chain stands at the end.
    pub end: TokenChain,
    /// Bytes that were tokenised for it: the rest was known.
    pub read: usize,
}

impl Text {
    /// Tokenises `text`, as far as `before` doesn't know it.
    pub fn of(tokenizer: &Tokenizer, model: &str, text: &str, before: Option<&Self>) -> Result<Self, String> {
        let known = before.map_or(&[][..], |before| before.known(text, tokenizer.reach()));
        let (mut marks, from) = (known.to_vec(), known.last());
        let (mut chain, at) = from.map_or((TokenChain::root(model), 0), |mark| (mark.chain, mark.at));
        let mut hashes = Vec::with_capacity(chain.blocks() + text.len() / 64);
        if let Some(before) = before {
            hashes.extend_from_slice(before.hashes.get(..chain.blocks()).unwrap_or_default());
        }
        let cuts: Vec<usize> = tokenizer.cuts(text, at).collect();
        let mut digests = Digests::of(text.as_bytes());
        let mut start = at;
        for (place, cut) in cuts.iter().enumerate() {
            if !is_kept(cuts.len() - place) {
                continue;
            }
            chain.extend(&mut hashes, &tokenizer.encode(&text[start..*cut])?);
            start = *cut;
            // Nearer to the end, what follows decides whether it stays a cut.
            if let Some(digest) = digests.at(cut + tokenizer.reach()) {
                marks.push(Mark { at: *cut, digest, chain });
            }
        }
        chain.extend(&mut hashes, &tokenizer.encode(&text[start..])?);
        thin(&mut marks);
        Ok(Self { marks, hashes: hashes.into(), end: chain, read: text.len() - at })
    }

    /// The marks that `text` shares.
    fn known(&self, text: &str, reach: usize) -> &[Mark] {
        let mut digests = Digests::of(text.as_bytes());
        let same =
            |mark: &&Mark| digests.at(mark.at + reach) == Some(mark.digest) && text.is_char_boundary(mark.at);
        &self.marks[..self.marks.iter().take_while(same).count()]
    }

    /// How many leading blocks two texts share.
    pub fn common(&self, other: &Self) -> usize {
        self.hashes.iter().zip(&*other.hashes).take_while(|(a, b)| a == b).count()
    }
}

/// Digests of growing prefixes, each byte read once.
struct Digests<'t> {
    text: &'t [u8],
    hash: Xxh3,
    at: usize,
}

impl<'t> Digests<'t> {
    fn of(text: &'t [u8]) -> Self {
        Self { text, hash: Xxh3::new(), at: 0 }
    }

    /// The digest of the first `end` bytes; `end` never falls.
    fn at(&mut self, end: usize) -> Option<u64> {
        self.hash.update(self.text.get(self.at..end)?);
        self.at = end;
        Some(self.hash.digest())
    }
}

/// Whether the cut that is `back` from the end (from 1) is worth a mark.
fn is_kept(back: usize) -> bool {
    back <= NEAR || back.is_power_of_two()
}

/// Drops marks in the middle until few enough are left, the first and the newest staying.
fn thin(marks: &mut Vec<Mark>) {
    while marks.len() > KEPT {
        // The one whose neighbours lie closest together for how far they are from the end.
        let end = marks.last().map_or(0, |mark| mark.at);
        let cost = |i: usize| {
            let gap = (marks[i + 1].at - marks[i - 1].at) as f64;
            gap / (end - marks[i - 1].at).max(1) as f64
        };
        let least = (1..marks.len() - NEAR).min_by(|a, b| cost(*a).total_cmp(&cost(*b)));
        let Some(least) = least else { return };
        marks.remove(least);
    }
}
