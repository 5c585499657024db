//! Guesses which lane a body continues before it is read, from samples of its bytes.
//!
//! A growing prompt keeps the bytes it had, so samples at fixed places up to its length still match when it comes
//! again, longer. A guess costs nothing when it is wrong: the digest of the whole prefix decides.

use hashbrown::HashMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes of a sample.
const SAMPLE: usize = 64;
/// Sample places: four to an octave, from 2 KB to 1 GB.
const PLACES: usize = 4 * 19;

fn place(step: usize) -> usize {
    (4 + step % 4) << (step / 4 + 9)
}

/// The samples of a body's messages, cumulated.
#[derive(Debug)]
pub struct Samples {
    digests: [u64; PLACES],
    count: usize,
}

impl Samples {
    /// `seed` keeps tenants apart.
    pub(super) fn of(array: &[u8], seed: u64) -> Self {
        let (mut digests, mut count, mut digest) = ([0; PLACES], 0, seed);
        while count < PLACES {
            let end = place(count);
            let Some(sample) = array.get(end - SAMPLE..end) else { break };
            digest = xxh3_64_with_seed(sample, digest);
            digests[count] = digest;
            count += 1;
        }
        Self { digests, count }
    }

    /// The digest that covers the most of the first `raw` bytes.
    pub(super) fn at(&self, raw: usize) -> Option<u64> {
        let fitting = (0..self.count).take_while(|&step| place(step) <= raw).last()?;
        Some(self.digests[fitting])
    }

    /// All digests, the longest first.
    pub(super) fn longest_first(&self) -> impl Iterator<Item = u64> + '_ {
        self.digests[..self.count].iter().rev().copied()
    }
}

/// Which lane last had these samples.
#[derive(Debug, Default)]
pub(super) struct Hints(HashMap<u64, u32>);

impl Hints {
    pub fn get(&self, digest: u64) -> Option<u32> {
        self.0.get(&digest).copied()
    }

    pub fn set(&mut self, digest: u64, lane: u32) {
        self.0.insert(digest, lane);
    }

    /// Forgets a hint, unless another lane has it by now.
    pub fn unset(&mut self, digest: u64, lane: u32) {
        if self.get(digest) == Some(lane) {
            self.0.remove(&digest);
        }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}
