//! Tokens without a tokenizer: canonical bytes divided by what the lane's `usage` taught.

use crate::core::types::Tokens;
use crate::prompt::{BLOCK_TOKENS, BYTES_PER_TOKEN, MEDIA_BYTES, MEDIA_TOKENS};

use super::line::{Line, Model};

/// Prompts with fewer tokens say little about the ratio.
const MIN_SAMPLE: u64 = 32;
/// Twice the largest block that engines cache by: `cached_tokens` says whether a longer answer was found again,
/// of a shorter one it may only say how it was rounded.
const SURE_OUTPUT: u64 = 256;
/// Ratios outside of this are a broken `usage`, not a tokenizer.
const RATIO: std::ops::RangeInclusive<f32> = 0.5..=16.0;
/// That a lane's text is like its model's counts as if it had been seen so often.
const LIKE: u8 = 2;
/// A lane remembers so many appends.
const MEMORY: u8 = 20;
/// One append says no more than this, or one part of it, of the lane's text.
const FACTOR: f64 = 4.0;

/// Canonical bytes and how many media items they hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Canonical bytes, media included.
    pub bytes: u64,
    /// Images, files and sounds.
    pub media: u64,
}

impl Size {
    /// What is here beyond `other`.
    pub const fn beyond(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_sub(other.bytes), media: self.media.saturating_sub(other.media) }
    }

    const fn text(self) -> u64 {
        self.bytes.saturating_sub(self.media * MEDIA_BYTES as u64)
    }

    fn tokens(self, ratio: f32) -> Tokens {
        (self.text() as f32 / ratio).round() as u64 + self.media * MEDIA_TOKENS
    }

    fn ratio(self, tokens: u64) -> Option<f32> {
        let tokens = tokens.saturating_sub(self.media * MEDIA_TOKENS);
        let ratio = self.text() as f32 / tokens as f32;
        (tokens >= MIN_SAMPLE && RATIO.contains(&ratio)).then_some(ratio)
    }
}

/// How a request lies against the lane's last commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lies {
    /// Nothing was committed, or nothing is shared.
    Apart,
    /// The same prompt again.
    Same,
    /// The committed prompt and more: the answer's echo, then what was appended.
    Beyond { echo: Size, rest: Size },
    /// Only the first `blocks` are shared.
    Shares { blocks: u64 },
}

/// What a lane learned about its tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Estimate {
    /// Bytes per token of a whole prompt.
    whole: f32,
    /// Tokens of what its turns append, as a multiple of what the model's line says.
    own: f32,
    /// Prompt tokens of the last commit.
    pub prompt: u32,
    /// Completion tokens of the last commit.
    output: u32,
    /// Appends that was learned from, up to [`MEMORY`].
    seen: u8,
    /// Whether the engine finds the answer again in the next prompt: not when the client drops the reasoning.
    echoes: bool,
}

impl Default for Estimate {
    fn default() -> Self {
        Self::starting(BYTES_PER_TOKEN as f32)
    }
}

impl Estimate {
    /// A new lane's, with the ratio its model showed elsewhere.
    pub const fn starting(whole: f32) -> Self {
        Self { whole, own: 1.0, prompt: 0, output: 0, seen: 0, echoes: true }
    }

    /// Input tokens of a request, and how many of them prompt plus output of the last commit hold (whole blocks).
    pub fn of(&self, size: Size, lies: Lies, line: &Line) -> (Tokens, Tokens) {
        let prompt = u64::from(self.prompt);
        match lies {
            _ if prompt == 0 => (size.tokens(self.whole), 0),
            Lies::Apart => (size.tokens(self.whole), 0),
            Lies::Same => (prompt, prompt),
            Lies::Beyond { echo, rest } => {
                let held = if self.found_again(echo, line) { u64::from(self.output) } else { 0 };
                let said = if held > 0 { held } else { self.inside(echo, line) };
                let input = prompt + said + self.appended(rest, line);
                (input, blocks(prompt + held).min(input))
            }
            Lies::Shares { blocks: shared } => {
                let input = size.tokens(self.whole);
                let bytes = Size { bytes: shared * (BLOCK_TOKENS * BYTES_PER_TOKEN) as u64, media: 0 };
                (input, blocks(bytes.tokens(self.whole)).min(input))
            }
        }
    }

    /// A bare text's growth: the answer it begins with, by its length in tokens, and the rest.
    pub fn split(&self, grown: Size, line: &Line) -> (Size, Size) {
        let answer = f64::from(self.output) / (line.text(1) * f64::from(self.own));
        let echo = Size { bytes: (answer as u64).min(grown.bytes), media: 0 };
        (echo, grown.beyond(echo))
    }

    /// Tokens a delta adds when the engine holds everything before it.
    pub fn delta(&self, size: Size, line: &Line) -> (Tokens, Tokens) {
        let held = u64::from(self.prompt) + u64::from(self.output);
        (held + self.appended(size, line), held)
    }

    /// Tokens of text within a message.
    fn inside(&self, size: Size, line: &Line) -> Tokens {
        (line.text(size.text()) * f64::from(self.own)).round() as u64 + size.media * MEDIA_TOKENS
    }

    /// Tokens of messages and what the template puts around them.
    fn appended(&self, size: Size, line: &Line) -> Tokens {
        if size == Size::default() {
            return 0;
        }
        (line.tokens(size.text()) * f64::from(self.own)).round() as u64 + size.media * MEDIA_TOKENS
    }

    /// Whether the next prompt holds the whole answer. With half of it gone (beside the marks around a call) the
    /// reasoning was dropped, and the shared prefix ends before it.
    fn found_again(&self, echo: Size, line: &Line) -> bool {
        self.echoes && self.appended(echo, line) * 2 >= u64::from(self.output)
    }

    /// Learns from an answer's `usage`, and lets the lane's model learn.
    pub fn learn(&mut self, size: Size, lies: Lies, usage: Usage, model: &mut Model) {
        let (expected, _) = self.of(size, lies, &model.line);
        let prompt = usage.prompt.unwrap_or(expected);
        if let (Lies::Beyond { echo, rest }, true) = (lies, self.prompt > 0) {
            self.correct(usage.cached);
            self.learn_append(echo, rest, usage.prompt, &mut model.line);
        }
        if let Some(ratio) = usage.prompt.and_then(|prompt| size.ratio(prompt)) {
            (self.whole, model.whole) = (ratio, ratio);
        }
        self.prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        self.output = u32::try_from(usage.completion.unwrap_or(0)).unwrap_or(u32::MAX);
    }

    /// `cached_tokens` tells whether the last answer was found again; less than the prompt is lost residency.
    fn correct(&mut self, cached: Option<u64>) {
        let (prompt, output) = (u64::from(self.prompt), u64::from(self.output));
        let Some(cached) = cached else { return };
        if output >= SURE_OUTPUT && cached + BLOCK_TOKENS as u64 >= prompt {
            self.echoes = cached >= prompt + output / 2;
        }
    }

    fn learn_append(&mut self, echo: Size, rest: Size, prompt: Option<u64>, line: &mut Line) {
        let Some(grown) = prompt.and_then(|p| p.checked_sub(u64::from(self.prompt))) else { return };
        // An echo counts as many tokens as the answer had, so only the rest is unknown.
        let (size, tokens) = if self.found_again(echo, line) {
            (rest, grown.saturating_sub(self.output.into()))
        } else {
            let (bytes, media) = (echo.bytes + rest.bytes, echo.media + rest.media);
            (Size { bytes, media }, grown)
        };
        let (bytes, tokens) = (size.text(), tokens.saturating_sub(size.media * MEDIA_TOKENS) as f64);
        if size == Size::default() || !Line::believes(bytes, tokens) {
            return;
        }
        // What is the lane's own is no news of its model.
        let factor = line.factor(bytes, tokens).clamp(1.0 / FACTOR, FACTOR) as f32;
        line.learn(bytes, tokens / f64::from(self.own));
        self.own += (factor - self.own) / f32::from(LIKE + self.seen + 1);
        self.seen = (self.seen + 1).min(MEMORY);
    }
}

/// What `usage` of an answer says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub prompt: Option<u64>,
    pub completion: Option<u64>,
    pub cached: Option<u64>,
}

/// Rounded down to whole blocks.
const fn blocks(tokens: Tokens) -> Tokens {
    tokens - tokens % BLOCK_TOKENS as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lane's estimate with a model of its own.
    #[derive(Default)]
    struct Lane(Estimate, Model);

    impl Lane {
        fn of(&self, size: Size, lies: Lies) -> (Tokens, Tokens) {
            self.0.of(size, lies, &self.1.line)
        }

        fn learn(&mut self, size: Size, lies: Lies, usage: Usage) {
            self.0.learn(size, lies, usage, &mut self.1);
        }
    }

    const fn text(bytes: u64) -> Size {
        Size { bytes, media: 0 }
    }

    fn usage(prompt: u64, completion: u64) -> Usage {
        Usage { prompt: Some(prompt), completion: Some(completion), cached: None }
    }

    #[test]
    fn starts_at_four_bytes_and_a_fixed_cost_per_image() {
        let e = Lane::default();
        assert_eq!(e.of(text(4000), Lies::Apart), (1000, 0));
        let image = Size { bytes: 400 + MEDIA_BYTES as u64, media: 1 };
        assert_eq!(e.of(image, Lies::Apart), (100 + MEDIA_TOKENS, 0));
    }

    #[test]
    fn append_is_within_a_tenth_after_two_turns() {
        // A tokenizer with 3.3 bytes a token for the prompt, 2.9 for what tools return.
        let mut e = Lane::default();
        e.learn(text(33_000), Lies::Apart, usage(10_000, 200));
        let first = Lies::Beyond { echo: text(600), rest: text(2900) };
        e.learn(text(36_500), first, usage(11_200, 200));
        let second = Lies::Beyond { echo: text(600), rest: text(5800) };
        let (input, held) = e.of(text(42_900), second);
        let (append, truth) = (input - held, 2000);
        assert!(append.abs_diff(truth) * 10 <= truth, "{append} against {truth}");
    }

    /// Turns of a recorded conversation: canonical bytes of the prompt, the echo and the rest, then what the API's
    /// `usage` said of prompt, completion and cached tokens.
    type Recorded = Vec<[u64; 6]>;

    /// Relative errors of `append_len` from the third turn on, sorted, and the error of their sum. A conversation
    /// has the model for itself when it's `alone`.
    fn errors(conversations: &[Recorded], alone: bool) -> (Vec<f64>, f64) {
        let (mut errors, mut missed, mut all) = (Vec::new(), 0, 0);
        let mut model = Model::default();
        for turns in conversations {
            let mut e = Lane(Estimate::default(), if alone { Model::default() } else { model });
            for (n, &[bytes, echo, rest, prompt, completion, cached]) in turns.iter().enumerate() {
                let grown = Lies::Beyond { echo: text(echo), rest: text(rest) };
                let lies = if n == 0 { Lies::Apart } else { grown };
                let (input, held) = e.of(text(bytes), lies);
                if n >= 2 {
                    let (before, said) = (turns[n - 1][3], turns[n - 1][4]);
                    let truth = prompt - blocks(before + said);
                    let off = (input - held).abs_diff(truth);
                    (missed, all) = (missed + off, all + truth);
                    errors.push(off as f64 / truth as f64);
                }
                let said = Usage { cached: Some(cached), ..usage(prompt, completion) };
                e.learn(text(bytes), lies, said);
            }
            model = e.1;
        }
        errors.sort_by(f64::total_cmp);
        (errors, missed as f64 / all as f64)
    }

    #[test]
    fn appends_of_real_agents_are_within_a_tenth() {
        let data = include_str!("../../tests/data/append-sizes.json");
        let conversations: Vec<Recorded> = serde_json::from_str(data).expect("recorded turns");
        // Nine in ten, and all appends together: no straight line over bytes does better than 0.20 and 0.11.
        for (alone, most, all) in [(true, 0.28, 0.19), (false, 0.24, 0.14)] {
            let (errors, pooled) = errors(&conversations, alone);
            let [median, worst] = [2, 10].map(|part| errors[errors.len() - 1 - errors.len() / part]);
            assert!(median <= 0.1 && worst <= most && pooled <= all, "{alone}: {median} {worst} {pooled}");
        }
    }

    #[test]
    fn a_lane_in_another_script_has_a_ratio_of_its_own() {
        let (mut lanes, mut model) = ([Estimate::default(); 2], Model::default());
        let grown = Lies::Beyond { echo: text(0), rest: text(3000) };
        let append = [1500, 750];
        lanes.iter_mut().for_each(|e| e.learn(text(4000), Lies::Apart, usage(1000, 0), &mut model));
        for turn in 1..12 {
            for (e, append) in lanes.iter_mut().zip(append) {
                e.learn(text(4000 + turn * 3000), grown, usage(1000 + turn * append, 0), &mut model);
            }
        }
        for (e, truth) in lanes.iter().zip(append) {
            let (input, _) = e.of(text(40_000), grown, &model.line);
            let append = input - u64::from(e.prompt);
            assert!(append.abs_diff(truth) * 10 <= truth, "{append} against {truth}");
        }
    }

    #[test]
    fn blocks_that_round_a_short_answer_away_do_not_mean_it_was_dropped() {
        let mut e = Lane::default();
        e.learn(text(8000), Lies::Apart, usage(1849, 67));
        let lies = Lies::Beyond { echo: text(268), rest: text(4000) };
        // A cache of 64 tokens a block: 1916 tokens are held, 1856 of them in whole blocks.
        e.learn(text(12_268), lies, Usage { cached: Some(1856), ..usage(2900, 71) });
        let (_, held) = e.of(text(16_552), Lies::Beyond { echo: text(284), rest: text(4000) });
        assert_eq!(held, blocks(2900 + 71));
    }

    #[test]
    fn the_tokens_of_the_template_are_learned_from_short_appends() {
        let mut e = Lane::default();
        e.learn(text(40_000), Lies::Apart, usage(10_000, 50));
        let mut at = (40_000, 10_000);
        let grown = |rest| Lies::Beyond { echo: text(200), rest: text(rest) };
        for rest in [40, 4000].repeat(16) {
            // Four bytes a token, in a frame of 14 tokens.
            at = (at.0 + 200 + rest, at.1 + 50 + rest / 4 + 14);
            e.learn(text(at.0), grown(rest), usage(at.1, 50));
        }
        for rest in [40, 4000] {
            let (input, _) = e.of(text(at.0 + 200 + rest), grown(rest));
            let (append, truth) = (input - at.1 - 50, rest / 4 + 14);
            assert!(append.abs_diff(truth) * 20 <= truth, "{append} against {truth}");
        }
    }

    #[test]
    fn a_dropped_reasoning_ends_the_shared_prefix_at_the_prompt() {
        let mut e = Lane::default();
        e.learn(text(40_000), Lies::Apart, usage(10_000, 1000));
        let lies = Lies::Beyond { echo: text(200), rest: text(400) };
        assert_eq!(e.of(text(40_600), lies), (10_158, blocks(10_000)));
        // A whole echo that the engine still did not find again: learned from cached_tokens.
        let whole = Lies::Beyond { echo: text(4000), rest: text(400) };
        assert_eq!(e.of(text(44_400), whole), (11_108, blocks(11_000)));
        let mut cached = usage(11_100, 1000);
        cached.cached = Some(10_000);
        e.learn(text(44_400), whole, cached);
        assert_eq!(e.of(text(48_800), whole).1, blocks(11_100));
    }

    #[test]
    fn a_broken_usage_teaches_nothing() {
        let mut e = Lane::default();
        e.learn(text(40_000), Lies::Apart, usage(1, 0));
        assert_eq!(e.0, Estimate { prompt: 1, ..Estimate::default() });
        e.learn(text(40_100), Lies::Beyond { echo: text(0), rest: text(100) }, usage(90_000, 0));
        assert_eq!((e.0.own, e.1), (1.0, Model::default()));
    }
}
