//! A person at the terminal: what is typed goes through the gateway, the answer appears as it comes.

use std::io::Write as _;

use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use super::script::body;
use crate::demo::client::{Http, Played, ask};

/// Tokens of an answer.
const ANSWER: u32 = 256;

/// Chats until standard input ends.
pub async fn talk(http: Http, gateway: String) {
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let (mut talk, mut messages) = (1, Vec::new());
    eprintln!("\nOr chat here; an empty line begins a new conversation.");
    show("you> ");
    while let Ok(Some(line)) = lines.next_line().await {
        let line = line.trim();
        if line.is_empty() {
            (talk, messages) = (talk + 1, Vec::new());
            show("(a new conversation)\nyou> ");
            continue;
        }
        messages.push(json!({"role": "user", "content": line}));
        let (session, body) = (format!("terminal-{talk}"), body(&messages, ANSWER));
        match ask(&http, &gateway, &session, messages.len() / 2, body, show).await {
            Ok(played) => {
                show(&told(&played));
                messages.push(json!({"role": "assistant", "content": played.text}));
            }
            Err(why) => {
                messages.pop();
                show(&format!("({why})"));
            }
        }
        show("\nyou> ");
    }
}

fn told(played: &Played) -> String {
    let Played { mode, worker, ttft, prompt_tokens, cached_tokens, .. } = played;
    let first = ttft.as_secs_f64();
    format!(
        "\n  [{mode} at {worker}, {cached_tokens} of {prompt_tokens} tokens cached, first token after {first:.2} s]"
    )
}

fn show(text: &str) {
    let mut out = std::io::stdout();
    // A terminal that is gone ends the program soon enough.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
