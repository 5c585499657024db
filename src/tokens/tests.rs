//! Against what the reference implementations made (`tests/data/tokens/make.py`), and against itself in one piece.

use std::path::Path;

use proptest::prelude::*;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::text::Text;
use super::*;
use crate::core::types::SessionId;

fn exact() -> Exact {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/tokenizer.json");
    Exact::load(&data, None).unwrap()
}

/// A request, and its text and ids by the references.
#[derive(serde::Deserialize)]
struct Golden {
    /// As it stands in the file: templates see the order of its keys.
    body: Box<RawValue>,
    text: String,
    ids: Vec<u32>,
}

fn golden() -> Vec<Golden> {
    serde_json::from_str(include_str!("../../tests/data/tokens/golden.json")).unwrap()
}

fn hashes(ids: &[u32]) -> Vec<crate::core::types::BlockHash> {
    let (mut chain, mut hashes) = (TokenChain::root("m"), Vec::new());
    chain.extend(&mut hashes, ids);
    hashes
}

#[test]
fn templates_and_tokenizers_agree_with_their_references() {
    let exact = exact();
    for Golden { body, text, ids } in golden() {
        let body = body.get().as_bytes();
        assert_eq!(exact.template().render(body).unwrap(), text);
        assert_eq!(exact.tokenizer().encode(&text).unwrap(), ids);
        let counted = exact.count(None, "m", body).unwrap();
        assert_eq!((counted.input_len, &*counted.chain), (ids.len() as u64, &*hashes(&ids)));
    }
}

/// The turns of one conversation, whose template drops the reasoning of earlier ones: counts stay exact, what is
/// shared ends where the template rewrote, and only the rest is read.
#[test]
fn a_lane_reads_only_what_it_does_not_share() {
    let (exact, lane) = (exact(), SessionId::new("scope/lane"));
    let turns: Vec<Golden> =
        golden().into_iter().filter(|case| !case.body.get().contains(r#""tools":"#)).collect();
    let mut before: Option<&[u32]> = None;
    for Golden { body, text, ids } in &turns {
        let counted = exact.count(Some(&lane), "m", body.get().as_bytes()).unwrap();
        assert_eq!((counted.input_len, &*counted.chain), (ids.len() as u64, &*hashes(ids)));
        if let Some(before) = before {
            let shared = before.iter().zip(ids).take_while(|(a, b)| a == b).count();
            assert!(Exact::read(&counted) < text.len(), "nothing was known");
            let held = counted.input_len - counted.append_len;
            assert_eq!(held, (shared / 24 * 24) as u64, "no answer is credited that was rewritten");
        }
        // Its answer is as long as nothing that follows could be.
        exact.commit(&lane, &counted, Some(100_000), None);
        before = Some(ids);
    }
    // The same again: all of it is held.
    let body = turns.last().unwrap().body.get();
    let again = exact.count(Some(&lane), "m", body.as_bytes()).unwrap();
    assert!(
        again.append_len < 24 && Exact::read(&again) < 200,
        "{} {}",
        again.append_len,
        Exact::read(&again)
    );
}

#[test]
fn an_answer_is_credited_when_the_next_prompt_has_room_for_it() {
    let (exact, lane) = (exact(), SessionId::new("scope/lane"));
    let user = json!({"role": "user", "content": "Look at the files. ".repeat(100)});
    let ask = |messages: Value| json!({"model": "m", "messages": messages}).to_string();
    let first = exact.count(Some(&lane), "m", ask(json!([user])).as_bytes()).unwrap();
    assert_eq!(first.append_len, first.input_len);
    let said = "Then edit them, please. ".repeat(40);
    let output = exact.tokenizer().encode(&format!("{said}<|im_end|>")).unwrap().len() as u64;
    exact.commit(&lane, &first, Some(output), Some(0));
    let next =
        ask(json!([user, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]));
    let second = exact.count(Some(&lane), "m", next.as_bytes()).unwrap();
    assert_eq!(second.input_len - second.append_len, (first.input_len + output) / 24 * 24);
    // The engine says that it found the prompt only.
    exact.commit(&lane, &second, Some(output), Some(first.input_len));
    let third = exact.count(Some(&lane), "m", next.replace("go on", "go on, go on").as_bytes()).unwrap();
    assert!(third.append_len < 48, "only the last message differs");
}

#[test]
fn what_has_no_text_is_not_counted() {
    let exact = exact();
    let image = json!({"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]});
    for body in [image.to_string(), "{}".into(), "[".into(), json!({"messages": [7]}).to_string()] {
        assert!(exact.count(None, "m", body.as_bytes()).is_none(), "{body}");
    }
    let parts = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]});
    assert!(exact.template().render(parts.to_string().as_bytes()).unwrap().contains("user\na\nb<|im_end|>"));
    let refused = Template::new("{{ raise_exception('no system') }}".into(), None, None).unwrap();
    let why = refused.render(parts.to_string().as_bytes()).unwrap_err().to_string();
    assert!(why.contains("no system"), "{why}");
    assert!(Template::new("{% if %}".into(), None, None).is_err());
    let missing = Exact::load(Path::new("no/such/tokenizer.json"), None).unwrap_err();
    assert!(missing.starts_with("no/such/tokenizer"), "{missing}");
}

/// Templates by what they do to earlier turns: leave them; drop their reasoning; move the tools behind them, to the
/// last message of the user's; count them.
const TEMPLATES: [&str; 4] = [
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.reasoning_content %}{{ '<think>' + \
     m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<tool_call>' + \
     (c.function | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}",
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}\
     {% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}{% if m.reasoning_content and \
     loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content | trim }}\
     {% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\
     {% endfor %}<|im_start|>assistant",
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}{% if m == users[-1] %}\
     tools: {{ tools | tojson }}<|endoftext|>{% endif %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}\
     {{ c.function.name }}{% endfor %}<|im_end|>{% endfor %}",
    "{{ messages | length }} messages{% for m in messages[-3:] %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}",
];

fn with_template(source: &str) -> Exact {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), source).unwrap();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/tokenizer.json");
    Exact::load(&tokenizer, Some(file.path())).unwrap()
}

/// An exchange of an agent: the answer it got, with calls and their results, or the user's next message.
fn exchange(kind: u8, text: &str, n: usize) -> Vec<Value> {
    let call = |i: usize| {
        json!({"id": format!("call_{n}_{i}"), "type": "function",
            "function": {"name": "look", "arguments": json!({"path": text, "n": i}).to_string()}})
    };
    let result = |i: usize| json!({"role": "tool", "tool_call_id": format!("call_{n}_{i}"), "content": text.repeat(3)});
    let thought =
        json!({"role": "assistant", "reasoning_content": format!("I think: {text}"), "content": text});
    match kind {
        0 => vec![thought, json!({"role": "user", "content": text.repeat(2)})],
        1 => {
            let mut asked = thought;
            asked["tool_calls"] = json!([call(0), call(1)]);
            vec![asked, result(0), result(1)]
        }
        2 => vec![json!({"role": "assistant", "content": null, "tool_calls": [call(0)]}), result(0)],
        _ => vec![
            json!({"role": "assistant", "content": [{"type": "text", "text": text}]}),
            json!({"role": "user", "content": "go on"}),
        ],
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Agents' conversations, whatever the template does to their earlier turns: a lane counts what a fresh count of
    /// the whole gives, credits no token that the ids don't share, and reads no known text again.
    #[test]
    fn conversations_in_pieces_as_in_one(
        template in 0..TEMPLATES.len(),
        steps in proptest::collection::vec((0u8..4, "[a-z ]{0,40}[.😀<|\n]{0,3}(<\\|im_end\\|>)?"), 1..7),
    ) {
        let (exact, lane) = (with_template(TEMPLATES[template]), SessionId::new("scope/lane"));
        let mut messages = vec![json!({"role": "system", "content": "Look at the files. ".repeat(200)}), json!({"role": "user", "content": "go"})];
        let tools = json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]);
        let (mut before, mut length): (Vec<u32>, usize) = (Vec::new(), 0);
        for (n, (kind, text)) in steps.iter().enumerate() {
            let body = json!({"model": "m", "messages": messages, "tools": tools}).to_string();
            let counted = exact.count(Some(&lane), "m", body.as_bytes()).unwrap();
            let fresh = exact.count(None, "m", body.as_bytes()).unwrap();
            prop_assert_eq!((counted.input_len, &counted.chain), (fresh.input_len, &fresh.chain));
            let ids = exact.tokenizer().encode(&exact.template().render(body.as_bytes()).unwrap()).unwrap();
            prop_assert_eq!((counted.input_len, &*counted.chain), (ids.len() as u64, &*hashes(&ids)));
            let shared = before.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            prop_assert_eq!(counted.input_len - counted.append_len, (shared / 24 * 24) as u64);
            // Only the prompt is held for sure: an answer of no tokens.
            exact.commit(&lane, &counted, Some(0), None);
            let all = Exact::read(&fresh);
            if template == 0 && n > 0 {
                let (read, new) = (Exact::read(&counted), all - length);
                prop_assert!(read <= new + 600, "{} of {}, of which {} are new", read, all, new);
            }
            (before, length) = (ids, all);
            messages.extend(exchange(*kind, text, n));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// However a text grows, is cut or rewritten: known parts and fresh ones give the ids of the whole.
    #[test]
    fn in_pieces_as_in_one(
        pieces in proptest::collection::vec(
            prop_oneof![
                4 => "[a-zé ]{0,12}",
                2 => r"[ \t\r\n]{0,4}",
                1 => "[0-9{}\":,😀<|>_]{0,8}",
                3 => prop_oneof![
                    Just("<|im_start|>"), Just("<|im_end|>"), Just("<tool_call>"), Just("</think>"), Just("<|im_"), Just("start|>"),
                ].prop_map(str::to_owned),
            ],
            0..60,
        ),
        steps in proptest::collection::vec((0usize..60, any::<bool>()), 1..6),
    ) {
        let exact = exact();
        let mut before: Option<Text> = None;
        for (end, rewritten) in steps {
            let mut some: Vec<&str> = pieces.iter().take(end).map(String::as_str).collect();
            if rewritten && some.len() > 2 {
                let middle = some.len() / 2;
                some[middle] = "rewritten";
            }
            let text = some.concat();
            let got = Text::of(exact.tokenizer(), "m", &text, before.as_ref()).unwrap();
            let whole = exact.tokenizer().encode(&text).unwrap();
            prop_assert_eq!(got.end.tokens(), whole.len() as u64);
            prop_assert_eq!(&*got.hashes, &*hashes(&whole));
            let fresh = Text::of(exact.tokenizer(), "m", &text, None).unwrap();
            prop_assert_eq!(got.end, fresh.end);
            before = Some(got);
        }
    }
}
