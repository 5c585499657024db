//! The scripted chat: two people who ask about a page take turns, then one of the conversations is sent once more
//! where nobody holds it.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use super::MODEL;
use crate::demo::client::{Http, Played, ask};

/// What they ask about.
const PAGE: &str = include_str!("../../../docs/algorithm.md");
/// Bytes of it in the prompt: some 700 tokens.
const PAGE_BYTES: usize = 2400;
/// Tokens of an answer.
const ANSWER: u32 = 24;

const ASKED: [(&str, &str); 6] = [
    ("ada", "What is this page about?"),
    ("ada", "What does Route do?"),
    ("ben", "What does Admit do?"),
    ("ada", "And what does Dispatch do?"),
    ("ben", "What is a pin?"),
    ("ada", "Thank you. What should I read next?"),
];

/// One turn of the script, answered.
#[derive(Debug)]
pub struct Turn {
    session: String,
    asked: &'static str,
    /// Whether a worker could hold its conversation.
    resident: bool,
    played: Played,
}

/// Plays the script; `each` sees a turn as soon as it is answered.
///
/// # Errors
/// A turn is not answered.
pub async fn play(http: &Http, gateway: &str, mut each: impl FnMut(&Turn)) -> Result<Vec<Turn>, String> {
    let mut talks: Vec<(&str, Vec<Value>)> = Vec::new();
    let mut turns: Vec<Turn> = Vec::new();
    let mut sent = |session: String, asked, resident, played| {
        let turn = Turn { session, asked, resident, played };
        each(&turn);
        turns.push(turn);
    };
    for (who, asked) in ASKED {
        let resident = talks.iter().any(|(name, _)| *name == who);
        if !resident {
            talks.push((who, vec![page(who)]));
        }
        let Some((_, messages)) = talks.iter_mut().find(|(name, _)| *name == who) else { continue };
        messages.push(json!({"role": "user", "content": asked}));
        let played = ask(http, gateway, who, messages.len() / 2 - 1, body(messages, ANSWER), |_| {}).await?;
        messages.push(json!({"role": "assistant", "content": played.text}));
        sent(who.to_owned(), asked, resident, played);
    }
    // The same turn where nothing is cached: another first word, and all that follows must be computed.
    if let Some((who, asked)) = ASKED.last()
        && let Some((_, messages)) = talks.iter_mut().find(|(name, _)| name == who)
    {
        messages.pop();
        messages[0] = page("nobody");
        let played = ask(http, gateway, "cold", 0, body(messages, ANSWER), |_| {}).await?;
        sent(format!("{who}, cold"), asked, false, played);
    }
    Ok(turns)
}

/// The body of a chat turn whose answer has at most `answer` tokens.
pub fn body(messages: &[Value], answer: u32) -> Bytes {
    let body = json!({
        "model": MODEL, "messages": messages, "max_tokens": answer, "temperature": 0, "stream": true,
        "stream_options": {"include_usage": true},
    });
    body.to_string().into()
}

/// Conversations differ from their first word on: they share nothing that a worker could have.
fn page(who: &str) -> Value {
    let end = (0..=PAGE_BYTES.min(PAGE.len())).rfind(|i| PAGE.is_char_boundary(*i)).unwrap_or_default();
    json!({"role": "system", "content": format!("{who} reads this page.\n\n{}", &PAGE[..end])})
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Played { mode, reason, worker, ttft, prompt_tokens, cached_tokens, .. } = &self.played;
        let how = if reason.is_empty() { mode.clone() } else { format!("{mode} ({reason})") };
        write!(
            f,
            "{:<10}{:<37}{how:<16}{worker:<4}{cached_tokens:>5} of {prompt_tokens:>4} cached {:>8.2} s",
            self.session,
            self.asked,
            ttft.as_secs_f64(),
        )
    }
}

/// The median first token with and without residency.
pub fn summary(turns: &[Turn]) -> String {
    let [resident, cold] = [true, false].map(|resident| median(turns, resident).as_secs_f64());
    format!(
        "first token (median): resident {resident:.2} s, cold {cold:.2} s: {:.0} times as long",
        cold / resident.max(1e-3)
    )
}

/// One JSON object.
pub fn json(turns: &[Turn]) -> String {
    let told = |t: &Turn| {
        json!({
            "session": t.session, "mode": t.played.mode, "reason": t.played.reason, "worker": t.played.worker,
            "ttft_ms": t.played.ttft.as_millis() as u64, "prompt_tokens": t.played.prompt_tokens,
            "cached_tokens": t.played.cached_tokens, "resident": t.resident, "text": t.played.text,
        })
    };
    let [resident, cold] = [true, false].map(|resident| median(turns, resident).as_millis() as u64);
    let turns: Vec<Value> = turns.iter().map(told).collect();
    json!({"turns": turns, "ttft_ms": {"resident": resident, "cold": cold}}).to_string()
}

fn median(turns: &[Turn], resident: bool) -> Duration {
    let mut times: Vec<Duration> =
        turns.iter().filter(|t| t.resident == resident).map(|t| t.played.ttft).collect();
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(resident: bool, ms: u64) -> Turn {
        let played = Played {
            turn: 0,
            mode: "seed".into(),
            reason: "local".into(),
            worker: "d0".into(),
            ttft: Duration::from_millis(ms),
            prompt_tokens: 900,
            cached_tokens: 0,
            body: Bytes::new(),
            text: "yes".into(),
        };
        Turn { session: "ada".into(), asked: "Why?", resident, played }
    }

    #[test]
    fn resident_and_cold_turns_are_told_apart() {
        let turns =
            [turn(false, 8000), turn(true, 100), turn(true, 200), turn(true, 9000), turn(false, 4000)];
        assert_eq!(summary(&turns), "first token (median): resident 0.20 s, cold 8.00 s: 40 times as long");
        let told: Value = serde_json::from_str(&json(&turns)).unwrap();
        assert_eq!(told["ttft_ms"], json!({"resident": 200, "cold": 8000}));
        assert_eq!(
            turns[0].to_string().split_whitespace().collect::<Vec<_>>().join(" "),
            "ada Why? seed (local) d0 0 of 900 cached 8.00 s"
        );
    }

    #[test]
    fn conversations_share_no_first_word() {
        let first = |who| page(who)["content"].as_str().unwrap_or_default().to_owned();
        let (ada, cold) = (first("ada"), first("nobody"));
        assert_ne!(ada.split(' ').next(), cold.split(' ').next());
        assert!(ada.len() > PAGE_BYTES && ada.contains("KVC-Router"));
    }
}
