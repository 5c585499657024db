//! What must hold of any input, for the seeded mutations of `tests/fuzz.rs` and for the fuzzers here.

use std::path::Path;

use bytes::Bytes;
use kvc_router::http::observe::Observer;
use kvc_router::node::transfer::{frame, message};
use kvc_router::prompt::{self, Api, Strip};
use kvc_router::sessions::{Answer, Headers, Incoming, Limits, Registry, Request};
use kvc_router::settings::keys::ApiKey;
use kvc_router::settings::{Layers, Settings};
use kvc_router::wire::events::{Decoder, encode};
use kvc_router::wire::{admit, plan::Plan};

const APIS: [(Api, &str); 4] = [
    (Api::Chat, "/v1/chat/completions"),
    (Api::Completions, "/v1/completions"),
    (Api::Responses, "/v1/responses"),
    (Api::Messages, "/v1/messages"),
];

/// The input in pieces; `cuts` says where.
fn pieces(mut input: &[u8], mut cuts: u64) -> Vec<&[u8]> {
    let mut pieces = Vec::new();
    while !input.is_empty() {
        cuts = cuts.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let (piece, rest) = input.split_at(1 + (cuts >> 40) as usize % input.len().min(40));
        pieces.push(piece);
        input = rest;
    }
    pieces
}

/// Whatever a body is, it is placed or refused; a second look at it finds the same blocks.
pub fn identity(pick: u8, value: &[u8], body: &[u8]) {
    let (api, path) = APIS[usize::from(pick) % APIS.len()];
    let mut registry = Registry::new(Limits::default());
    let names = ["x-session-id", "x-claude-code-session-id", "authorization", "x-kvc-session-id"];
    let headers = [(names[usize::from(pick / 4) % names.len()], value)];
    let incoming = Incoming { path, headers: Headers(&headers), body };
    let Ok(request) = Request::read(&incoming, &registry) else { return };
    let first = registry.place(&request, 1);
    registry.commit(&first, &Answer { ok: true, ..Answer::default() }, 2);
    let Ok(request) = Request::read(&incoming, &registry) else { panic!("it was good a moment ago") };
    let second = registry.place(&request, 3);
    assert_eq!(first.chain, second.chain, "the same body has the same blocks");
    assert!(prompt::canonical(api, body).is_ok());
    let _ = Strip { attribution: true, cache_control: true }.body(api, body);
}

/// What is seen of an answer does not depend on how it is cut.
pub fn answers(pick: u8, cuts: u64, input: &[u8]) {
    let (api, _) = APIS[usize::from(pick) % APIS.len()];
    for sse in [true, false] {
        let new = || if sse { Observer::sse(api) } else { Observer::json(api) };
        let (mut whole, mut cut) = (new(), new());
        whole.feed(input);
        pieces(input, cuts).into_iter().for_each(|piece| cut.feed(piece));
        assert_eq!(whole.next_event(), cut.next_event());
        assert_eq!(whole.into_seen(), cut.into_seen());
    }
}

/// Frames of the event stream: the same messages however the stream is cut, and what is read can be written again.
pub fn events(cuts: u64, input: &[u8]) {
    let read = |pieces: Vec<&[u8]>| {
        let (mut decoder, mut messages) = (Decoder::new(1 << 16), Vec::new());
        for piece in pieces {
            decoder.push(piece);
            loop {
                match decoder.next_message() {
                    Ok(Some(message)) => messages.push(message),
                    Ok(None) => break,
                    Err(_) => return messages,
                }
            }
        }
        messages
    };
    let (whole, cut) = (read(vec![input]), read(pieces(input, cuts)));
    assert_eq!(whole, cut);
    for message in whole {
        let mut decoder = Decoder::default();
        decoder.push(&encode(&message));
        assert_eq!(decoder.next_message().ok().flatten(), Some(message));
    }
}

/// Frames and messages of a KV transfer: damage is an error, never a panic, and what is read is of the size announced.
pub fn transfers(runtime: &tokio::runtime::Runtime, input: &[u8]) {
    runtime.block_on(async {
        let mut from = input;
        while let Ok(frame) = frame::read(&mut from).await {
            assert!(frame.payload.len() <= input.len());
        }
    });
    let payload = Bytes::copy_from_slice(input);
    let _ = message::read_offer(payload.clone());
    let _ = message::read_blocks(payload, 16);
    for offered in [0, 3, 1000] {
        if let Ok(wanted) = message::read_want(input, offered) {
            assert_eq!(wanted.len(), offered);
        }
    }
    let _ = message::from_json::<message::Begin>("begin", input);
}

/// Admissions and plans: read, or refused with a sentence.
pub fn admissions(input: &[u8]) {
    if let Ok((_, hashes)) = admit::decode(input) {
        assert!(hashes.len() * 8 <= input.len());
    }
    let _ = serde_json::from_slice::<Plan>(input);
}

/// Settings: valid, or one line that says what is wrong; what is valid reads back the same. `file` is written over.
pub fn settings(file: &Path, input: &[u8]) {
    let load = |bytes: &[u8]| {
        std::fs::write(file, bytes).expect("a writable file");
        Settings::load(&Layers { file: Some(file.to_owned()), ..Layers::default() })
    };
    match load(input) {
        Ok(loaded) => {
            let again = load(loaded.to_toml().as_bytes()).expect("valid settings as we write them");
            assert_eq!(again.settings, loaded.settings);
        }
        Err(problem) => assert!(!problem.to_string().is_empty()),
    }
    if let Ok(text) = std::str::from_utf8(input)
        && let Ok(keys) = ApiKey::parse_file(text)
    {
        assert!(keys.iter().all(|key| key.to_string().parse().as_ref() == Ok(key)));
    }
}
