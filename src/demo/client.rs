//! An agent: plays one conversation turn by turn over HTTP and notes how each turn went.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, header};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;

use super::workload::Conversation;

/// Think time is cut here, in seconds of modelled time: a demo should not wait for a person's lunch.
const MAX_GAP: f64 = 10.0;
/// Times a turn is sent again after an error.
const RETRIES: u32 = 5;

/// How one turn went.
#[derive(Debug, Clone)]
pub struct Played {
    /// Its place in the session.
    pub turn: usize,
    /// `x-kvc-mode`.
    pub mode: String,
    /// `x-kvc-reason`.
    pub reason: String,
    /// `x-kvc-worker`.
    pub worker: String,
    /// Time to the first token.
    pub ttft: Duration,
    /// From `usage`.
    pub prompt_tokens: u64,
    /// From `usage`.
    pub cached_tokens: u64,
    /// What was asked.
    pub body: Bytes,
    /// What was answered.
    pub text: String,
}

/// What an agent reports.
#[derive(Debug)]
pub enum Note {
    /// A turn was answered.
    Played(Played),
    /// A request failed, and why.
    Failed(String),
}

/// Talks to the gateway.
pub type Http = Client<HttpConnector, Full<Bytes>>;

/// A client for any number of agents.
pub fn http() -> Http {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new()).build(connector)
}

/// Plays a conversation to its end. `time_scale`: how much faster than recorded.
pub async fn play(
    http: Http,
    gateway: String,
    model: String,
    mut conversation: Conversation,
    time_scale: f64,
    mut note: impl FnMut(Note),
) {
    let mut turn = 0;
    while let Some((recorded, body)) = conversation.next_request(&model) {
        let gap = recorded.gap.unwrap_or(0.0).clamp(0.0, MAX_GAP);
        tokio::time::sleep(Duration::from_secs_f64(gap / time_scale)).await;
        let body = Bytes::from(body);
        let mut left = RETRIES;
        let played = loop {
            match ask(&http, &gateway, conversation.name(), turn, body.clone(), |_| {}).await {
                Ok(played) => break played,
                Err(error) => note(Note::Failed(format!("{} turn {turn}: {error}", conversation.name()))),
            }
            if left == 0 {
                return;
            }
            left -= 1;
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        tracing::debug!(
            session = conversation.name(),
            turn,
            mode = played.mode,
            reason = played.reason,
            worker = played.worker,
            recorded = recorded.input,
            prompt = played.prompt_tokens,
            cached = played.cached_tokens,
            "turn"
        );
        conversation.answered(played.text.clone());
        note(Note::Played(played));
        turn += 1;
    }
}

/// Sends one streamed turn; `heard` gets the answer's text as it comes.
///
/// # Errors
/// Why there is no whole answer.
pub async fn ask(
    http: &Http,
    gateway: &str,
    session: &str,
    turn: usize,
    body: Bytes,
    mut heard: impl FnMut(&str),
) -> Result<Played, String> {
    let request = Request::post(format!("{gateway}/v1/chat/completions"))
        .header(header::CONTENT_TYPE, "application/json")
        .header("x-session-id", session)
        .body(Full::new(body.clone()))
        .map_err(|e| e.to_string())?;
    let started = Instant::now();
    let response = http.request(request).await.map_err(|e| e.to_string())?;
    let (head, mut stream) = response.into_parts();
    let mut answer = Answer::default();
    let mut line = Vec::new();
    let mut first = None;
    while let Some(frame) = stream.frame().await {
        let frame = frame.map_err(|e| format!("the answer broke off: {e}"))?;
        for byte in frame.data_ref().into_iter().flatten() {
            if *byte != b'\n' {
                line.push(*byte);
                continue;
            }
            let before = answer.text.len();
            answer.line(&line)?;
            line.clear();
            if answer.text.len() > before {
                first.get_or_insert_with(|| started.elapsed());
                heard(&answer.text[before..]);
            }
        }
    }
    if !head.status.is_success() {
        return Err(format!("{}: {}", head.status, String::from_utf8_lossy(&line)));
    }
    if !answer.done {
        return Err("the answer ended without [DONE]".into());
    }
    Ok(Played {
        turn,
        mode: text(&head.headers, "x-kvc-mode"),
        reason: text(&head.headers, "x-kvc-reason"),
        worker: text(&head.headers, "x-kvc-worker"),
        ttft: first.unwrap_or_else(|| started.elapsed()),
        prompt_tokens: answer.usage.prompt_tokens,
        cached_tokens: answer.usage.prompt_tokens_details.cached_tokens,
        body,
        text: answer.text,
    })
}

fn text(headers: &HeaderMap, name: &str) -> String {
    headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned()
}

#[derive(Default)]
struct Answer {
    text: String,
    usage: Usage,
    done: bool,
}

#[derive(Default, Deserialize)]
struct Usage {
    prompt_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Details,
}

#[derive(Default, Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: u64,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
}

#[derive(Default, Deserialize)]
struct Delta {
    #[serde(default)]
    content: Option<String>,
}

impl Answer {
    fn line(&mut self, line: &[u8]) -> Result<(), String> {
        let Some(data) = line.strip_prefix(b"data: ") else { return Ok(()) };
        let data = data.trim_ascii_end();
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(data).map_err(|e| format!("bad event: {e}"))?;
        if let Some(error) = chunk.error {
            return Err(format!("error event: {error}"));
        }
        for choice in chunk.choices {
            self.text.push_str(&choice.delta.content.unwrap_or_default());
        }
        self.usage = chunk.usage.unwrap_or(std::mem::take(&mut self.usage));
        Ok(())
    }
}
