//! What an engine says of its cache (`cached_tokens`), held against what the books expect of it.

use serde_json::{Value, json};

use super::books::Served;
use crate::core::types::{BlockHash, Tokens};

/// Differences up to this are rounding: whole blocks on both sides, the template's own tokens.
const SLACK: Tokens = 64;
/// And up to this share of what was expected: a block does not have the same number of tokens everywhere.
const SLACK_SHARE: f64 = 0.1;
/// An engine that has never found anything in its cache after this many turns that should have is not believed.
const CHANCES: u32 = 3;

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub struct Trust {
    /// Turns that found what they should.
    hits: u64,
    /// Turns that found less.
    misses: u64,
    /// Answers without `cached_tokens`, or with an impossible one.
    silent: u64,
}

/// How much less an engine held than it should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortfall {
    /// First block of the chain that it did not hold.
    pub from: usize,
    /// How many of its tokens.
    pub tokens: Tokens,
}

impl Trust {
    /// Whether what it says of its cache is worth anything.
    pub fn believed(&self) -> bool {
        self.hits > 0 || self.misses < u64::from(CHANCES)
    }

    /// Compares an answer with what was expected: the first `expected` blocks of `chain`. `None`: as expected, or more,
    /// or not to be known.
    pub fn judge(&mut self, chain: &[BlockHash], expected: usize, served: &Served) -> Option<Shortfall> {
        if expected == 0 {
            return None;
        }
        let (Some(prompt), Some(cached)) =
            (served.prompt, served.cached.filter(|c| Some(*c) <= served.prompt))
        else {
            self.silent += 1;
            return None;
        };
        let per_block = prompt as f64 / (chain.len() as f64 + 0.5);
        let should = (expected as f64 * per_block) as Tokens;
        if cached + SLACK + (should as f64 * SLACK_SHARE) as Tokens >= should {
            self.hits += 1;
            return None;
        }
        self.misses += 1;
        let from = ((cached as f64 / per_block) as usize).min(expected);
        self.believed().then_some(Shortfall { from, tokens: should - cached })
    }

    /// For `/admin/workers`.
    pub fn observe(&self) -> Value {
        json!({"as_expected": self.hits, "held_less": self.misses, "silent": self.silent, "believed": self.believed()})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(prompt: Tokens, cached: impl Into<Option<Tokens>>) -> Served {
        Served { prompt: Some(prompt), cached: cached.into(), ..Served::default() }
    }

    fn chain(blocks: u64) -> Vec<BlockHash> {
        (0..blocks).map(BlockHash).collect()
    }

    #[test]
    fn less_than_expected_is_found_at_its_block() {
        let (mut trust, chain) = (Trust::default(), chain(100));
        assert_eq!(trust.judge(&chain, 80, &served(3015, 2400)), None);
        assert_eq!(trust.judge(&chain, 80, &served(3015, 2110)), None);
        let short = trust.judge(&chain, 80, &served(3015, 900));
        assert_eq!(short, Some(Shortfall { from: 30, tokens: 1500 }));
        assert_eq!(trust.judge(&chain, 0, &served(3015, 0)), None);
    }

    /// One that always says 0 is not believed; one that says more than there is, or nothing, is no evidence.
    #[test]
    fn liars_are_not_believed() {
        let (mut trust, chain) = (Trust::default(), chain(100));
        let said: Vec<bool> = (0..5).map(|_| trust.judge(&chain, 80, &served(3000, 0)).is_some()).collect();
        assert_eq!(said, [true, true, false, false, false]);
        let mut trust = Trust::default();
        for cached in [Some(4000), None] {
            assert_eq!(trust.judge(&chain, 80, &served(3000, cached)), None);
        }
        assert_eq!((trust.silent, trust.hits, trust.misses), (2, 0, 0));
    }
}
