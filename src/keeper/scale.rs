//! Engine tokens and blocks of the router's chain. A block is a fixed piece of the prompt; how many of the engine's
//! tokens it makes, the answers' `usage` tells. The books are kept in blocks, so only lengths are converted.

use crate::core::types::Tokens;

/// Weight of a new observation.
const LEARN: f64 = 0.25;
/// Shorter prompts say little: the template's own tokens weigh too much.
const MIN_BLOCKS: usize = 8;
/// The books are resized when the ratio has moved this far.
const STEP: f64 = 0.02;
/// Ratios outside of this are a broken `usage`, not a tokenizer.
const SANE: std::ops::RangeInclusive<f64> = 0.2..=5.0;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    block: f64,
    /// Engine tokens per nominal token.
    ratio: f64,
    /// The ratio the books were sized with.
    applied: f64,
}

impl Scale {
    /// Before anything was learned: a token is a token.
    pub fn new(block_tokens: u32) -> Self {
        Self { block: f64::from(block_tokens), ratio: 1.0, applied: 1.0 }
    }

    /// Engine tokens of a block.
    pub fn per_block(&self) -> f64 {
        self.applied * self.block
    }

    /// Learns from a prompt of `blocks` whole blocks that was `tokens` long. Returns whether the books must be resized.
    pub fn learn(&mut self, blocks: usize, tokens: Tokens) -> bool {
        // Half a block more, on average, fills no whole one.
        let seen = tokens as f64 / ((blocks as f64 + 0.5) * self.block);
        if blocks < MIN_BLOCKS || !SANE.contains(&seen) {
            return false;
        }
        self.ratio += (seen - self.ratio) * LEARN;
        let moved = (self.ratio / self.applied - 1.0).abs() > STEP;
        if moved {
            self.applied = self.ratio;
        }
        moved
    }

    /// Engine tokens as the books count them.
    pub fn nominal(&self, tokens: Tokens) -> Tokens {
        (tokens as f64 / self.applied).round() as Tokens
    }

    /// Tokens of the books as the engine counts them.
    pub fn real(&self, nominal: Tokens) -> Tokens {
        (nominal as f64 * self.applied).round() as Tokens
    }

    /// The books' length of a prompt: its whole blocks, and what of `tokens` may be behind them.
    pub fn prompt(&self, blocks: usize, tokens: Tokens) -> Tokens {
        let whole = blocks as Tokens * self.block as Tokens;
        tokens.clamp(whole, whole + self.block as Tokens - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_teaches_the_ratio_and_nonsense_does_not() {
        let mut scale = Scale::new(24);
        assert_eq!((scale.nominal(1000), scale.prompt(10, 9000), scale.prompt(10, 3)), (1000, 263, 240));
        for _ in 0..40 {
            scale.learn(100, 3015);
        }
        assert!((scale.per_block() - 30.0).abs() < 0.6, "{scale:?}");
        assert!(scale.nominal(30_000).abs_diff(24_000) < 500 && scale.real(24_000).abs_diff(30_000) < 600);
        let before = scale;
        assert!(!scale.learn(100, 1) && !scale.learn(100, 1_000_000) && !scale.learn(2, 200));
        assert_eq!(scale, before);
    }
}
