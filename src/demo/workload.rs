//! Recorded sessions as conversations: prompts of the recorded lengths that grow, branch and shrink as recorded,
//! around the answers the workers really give.

use std::io::Read as _;

use serde::Deserialize;

/// Bytes of text per token of the builtin workers.
const BYTES: u64 = 4;
/// A prompt that keeps all but this many tokens of the previous one continues it.
const SLACK: u64 = 2048;

const SAMPLE: &[u8] = include_bytes!("../../traces/sample.sessions.jsonl.gz");

/// A recorded session.
#[derive(Debug, Clone, Deserialize)]
pub struct Session {
    /// Its name.
    pub session: String,
    models: Vec<String>,
    block: u64,
    shared_prefix_tokens: u64,
    /// Its turns.
    pub turns: Vec<Turn>,
}

/// A recorded turn.
#[derive(Debug, Clone, Deserialize)]
pub struct Turn {
    /// Tokens of its prompt.
    #[serde(rename = "in")]
    pub input: u64,
    /// Tokens of the answer.
    #[serde(rename = "out")]
    pub output: u64,
    /// Seconds of think time before it.
    #[serde(default)]
    pub gap: Option<f64>,
    h: Vec<(u64, u64)>,
}

/// The sample in the repository.
///
/// # Errors
/// The sample is damaged.
pub fn sample() -> Result<Vec<Session>, String> {
    let mut text = String::new();
    flate2::read::GzDecoder::new(SAMPLE).read_to_string(&mut text).map_err(|e| format!("sample: {e}"))?;
    let parse = |(i, line)| serde_json::from_str(line).map_err(|e| format!("sample, line {}: {e}", i + 1));
    text.lines().enumerate().map(parse).collect()
}

#[derive(Debug, Clone, serde::Serialize)]
struct Message {
    role: &'static str,
    content: String,
}

/// A session being played: the conversation so far.
#[derive(Debug)]
pub struct Conversation {
    session: Session,
    messages: Vec<Message>,
    next: usize,
}

impl Conversation {
    /// A conversation that has not begun.
    pub fn new(session: Session) -> Self {
        Self { session, messages: Vec::new(), next: 0 }
    }

    /// Name of the session.
    pub fn name(&self) -> &str {
        &self.session.session
    }

    /// The next recorded turn and the request body for it; `None` when all were played.
    pub fn next_request(&mut self, model: &str) -> Option<(Turn, Vec<u8>)> {
        let turn = self.session.turns.get(self.next)?.clone();
        let kept = self.kept();
        self.keep(kept);
        let have: u64 = self.tokens();
        let seed = format!("{} {}", self.session.session, self.next);
        if self.messages.is_empty() {
            let shared = self.session.shared_prefix_tokens.min(turn.input);
            let system = format!("{:?} {shared}", self.session.models);
            self.push("system", filler(&system, shared * BYTES));
            self.push("user", filler(&seed, (turn.input - shared).max(1) * BYTES));
        } else {
            self.push("user", filler(&seed, turn.input.saturating_sub(have).max(1) * BYTES));
        }
        self.next += 1;
        let body = serde_json::json!({
            "model": model,
            "messages": self.messages,
            "max_tokens": turn.output.max(1),
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        Some((turn, body.to_string().into_bytes()))
    }

    /// What the worker answered.
    pub fn answered(&mut self, text: String) {
        self.push("assistant", text);
    }

    fn push(&mut self, role: &'static str, content: String) {
        self.messages.push(Message { role, content });
    }

    fn tokens(&self) -> u64 {
        self.messages.iter().map(|m| m.content.len() as u64 / BYTES).sum()
    }

    /// Tokens of the conversation that the next turn keeps; all of them when it just goes on.
    fn kept(&self) -> u64 {
        let turns = &self.session.turns;
        let Some(last) = self.next.checked_sub(1).and_then(|i| turns.get(i)) else { return 0 };
        let common = common(&last.h, &turns[self.next].h) * self.session.block;
        if common + SLACK >= last.input { u64::MAX } else { common }
    }

    /// Cuts the conversation to whole messages within `tokens`, but never into the system prompt.
    fn keep(&mut self, tokens: u64) {
        let mut left = tokens;
        let fits = |m: &&Message| {
            let size = m.content.len() as u64 / BYTES;
            let fits = size <= left;
            left = left.saturating_sub(size);
            fits
        };
        let keep = self.messages.iter().take_while(fits).count();
        let system = usize::from(!self.messages.is_empty());
        self.messages.truncate(keep.max(system));
    }
}

/// Blocks two run-length lists share from the front.
fn common(a: &[(u64, u64)], b: &[(u64, u64)]) -> u64 {
    let ids = |runs: &[(u64, u64)]| -> Vec<u64> { runs.iter().flat_map(|(s, n)| *s..s + n).collect() };
    ids(a).iter().zip(ids(b)).take_while(|(a, b)| **a == *b).count() as u64
}

/// Text of exactly `bytes` bytes, the same for the same seed.
fn filler(seed: &str, bytes: u64) -> String {
    use rand::{Rng as _, SeedableRng as _};
    const WORDS: [&str; 16] = [
        "let", "cache", "block", "router", "return", "worker", "self", "match", "error", "test", "value",
        "branch", "token", "commit", "file", "turn",
    ];
    let mut rng = rand::rngs::SmallRng::seed_from_u64(xxhash_rust::xxh3::xxh3_64(seed.as_bytes()));
    let mut text = String::with_capacity(bytes as usize + 8);
    while text.len() < bytes as usize {
        text.push_str(WORDS[rng.random_range(0..WORDS.len())]);
        text.push(if rng.random_range(0..9) == 0 { '\n' } else { ' ' });
    }
    text.truncate(bytes as usize);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_plays_at_its_recorded_lengths() {
        let sessions = sample().unwrap();
        assert_eq!((sessions.len(), sessions.iter().map(|s| s.turns.len()).sum::<usize>()), (8, 268));
        for session in sessions {
            let mut conversation = Conversation::new(session);
            let mut before = 0;
            while let Some((turn, body)) = conversation.next_request("m") {
                assert!(serde_json::from_slice::<serde_json::Value>(&body).is_ok());
                let tokens = conversation.tokens();
                // A turn may shrink below its system prompt only by what the trace's blocks leave open.
                assert!(
                    tokens + 1 >= turn.input.min(before) && tokens <= turn.input.max(before + 1),
                    "{tokens}"
                );
                conversation.answered(filler("answer", turn.output * BYTES));
                before = conversation.tokens();
            }
        }
    }

    #[test]
    fn filler_is_exact_and_seeded() {
        assert_eq!(filler("a", 401).len(), 401);
        assert_eq!(filler("a", 100), filler("a", 100));
        assert_ne!(filler("a", 100), filler("b", 100));
    }
}
