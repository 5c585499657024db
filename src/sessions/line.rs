//! Tokens of appended text, from its canonical bytes: a straight line that a model's lanes learn together.

use hashbrown::HashMap;

use crate::prompt::BYTES_PER_TOKEN;

/// Tokens of one byte, and of the template around an append (roles, marks, the head of the next answer), before
/// anything is known; then how far either may be off (standard deviations).
const PRIOR: [f64; 2] = [1.0 / BYTES_PER_TOKEN as f64, 8.0];
const DOUBT: [f64; 2] = [0.05, 8.0];
/// Tokenizers have half a byte to sixteen bytes a token, templates up to this many tokens: beyond is a broken `usage`.
const PER_BYTE: [f64; 2] = [1.0 / 16.0, 2.0];
const FRAME: [f64; 2] = [0.0, 64.0];
/// Texts scatter around the line by this part of their tokens and of `SMALL` more.
const SCATTER: f64 = 0.1;
const SMALL: f64 = 12.0;
/// One text moves the line by no more than so many standard deviations of what was to be expected.
const ODD: f64 = 2.5;
/// What an older text counts for with each new one.
const KEEP: f64 = 0.98;

/// `per byte * bytes + frame`, fitted by recursive least squares of the relative error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Line {
    per_byte: f64,
    frame: f64,
    /// Covariance of the two: both variances, then what they share.
    doubt: [f64; 3],
}

impl Default for Line {
    fn default() -> Self {
        let [per_byte, frame] = PRIOR;
        Self { per_byte, frame, doubt: [DOUBT[0] * DOUBT[0], DOUBT[1] * DOUBT[1], 0.0] }
    }
}

impl Line {
    /// Tokens of text within a message.
    pub fn text(&self, bytes: u64) -> f64 {
        self.per_byte * bytes as f64
    }

    /// Tokens of an append with its frame.
    pub fn tokens(&self, bytes: u64) -> f64 {
        self.text(bytes) + self.frame
    }

    /// What `tokens` are to what the line says of them; near 1 for short texts, which tell little.
    pub fn factor(&self, bytes: u64, tokens: f64) -> f64 {
        (tokens + SMALL) / (self.tokens(bytes) + SMALL)
    }

    /// Whether a tokenizer can make so many tokens of so many bytes.
    pub fn believes(bytes: u64, tokens: f64) -> bool {
        let bytes = bytes as f64;
        (PER_BYTE[0] * bytes..=PER_BYTE[1] * bytes + FRAME[1]).contains(&tokens)
    }

    /// Learns from an append whose tokens an engine counted.
    pub fn learn(&mut self, bytes: u64, tokens: f64) {
        let (x, expected) = (bytes as f64, self.tokens(bytes));
        let [a, b, ab] = self.doubt;
        let (pa, pb) = (x * a + ab, x * ab + b);
        let scatter = SCATTER * (expected + SMALL);
        let variance = x * pa + pb + scatter * scatter;
        let odd = ODD * variance.sqrt();
        let missed = (tokens - expected).clamp(-odd, odd) / variance;
        self.per_byte = (self.per_byte + pa * missed).clamp(PER_BYTE[0], PER_BYTE[1]);
        self.frame = (self.frame + pb * missed).clamp(FRAME[0], FRAME[1]);
        let shared = ab - pa * pb / variance;
        self.doubt = [a - pa * pa / variance, b - pb * pb / variance, shared].map(|part| part / KEEP);
        self.bound();
    }

    /// Nothing is doubted more than at the beginning, however long nothing was heard of it.
    fn bound(&mut self) {
        for (at, doubt) in DOUBT.into_iter().enumerate() {
            let over = (self.doubt[at] / (doubt * doubt)).max(1.0);
            self.doubt[at] /= over;
            self.doubt[2] /= over.sqrt();
        }
    }
}

/// What the lanes of a model have shown so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Model {
    /// Bytes per token of the prompt answered last.
    pub whole: f32,
    /// What its turns append.
    pub line: Line,
}

impl Default for Model {
    fn default() -> Self {
        Self { whole: BYTES_PER_TOKEN as f32, line: Line::default() }
    }
}

/// Models by scope.
#[derive(Debug, Default)]
pub(super) struct Models(HashMap<u64, Model>);

impl Models {
    /// More scopes than this begin anew.
    const CAP: usize = 4096;

    pub fn get(&self, scope: u64) -> Model {
        self.0.get(&scope).copied().unwrap_or_default()
    }

    pub fn set(&mut self, scope: u64, model: Model) {
        if self.0.len() >= Self::CAP && !self.0.contains_key(&scope) {
            self.0.clear();
        }
        self.0.insert(scope, model);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn finds_both_parts_of_a_line() {
        let mut line = Line::default();
        for bytes in [40, 4000, 700].repeat(10) {
            line.learn(bytes, bytes as f64 / 3.0 + 14.0);
        }
        for bytes in [0, 40, 9000] {
            let (found, truth) = (line.tokens(bytes), bytes as f64 / 3.0 + 14.0);
            assert!((found - truth).abs() < 0.5 + truth / 100.0, "{found} against {truth}");
        }
    }

    #[test]
    fn one_odd_text_moves_little() {
        let mut line = Line::default();
        (0..30).for_each(|_| line.learn(2000, 500.0));
        let before = line.tokens(2000);
        line.learn(2000, 4000.0);
        assert!((line.tokens(2000) / before) < 1.2);
    }

    proptest! {
        /// Whatever engines say, the line stays one that a tokenizer can have.
        #[test]
        fn stays_sane(texts in proptest::collection::vec((0u64..2_000_000, 0.0f64..1e7), 0..300)) {
            let mut line = Line::default();
            for (bytes, tokens) in texts {
                line.learn(bytes, tokens);
                prop_assert!((PER_BYTE[0]..=PER_BYTE[1]).contains(&line.per_byte));
                prop_assert!((FRAME[0]..=FRAME[1]).contains(&line.frame));
                let [a, b, ab] = line.doubt;
                prop_assert!(a >= 0.0 && b >= 0.0 && ab * ab <= a * b * 1.001 + 1e-9, "{:?}", line);
            }
        }
    }
}
