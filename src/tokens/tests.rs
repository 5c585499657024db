//! Against what the reference implementations made (`tests/data/tokens/make.py`), and against itself in one piece.

use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::text::Text;
use super::*;
use crate::core::types::SessionId;

fn exact() -> Exact {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/tokenizer.json");
    Exact::load(&data, None).unwrap()
}

fn golden() -> Vec<Value> {
    serde_json::from_str(include_str!("../../tests/data/tokens/golden.json")).unwrap()
}

fn ids(case: &Value) -> Vec<u32> {
    serde_json::from_value(case["ids"].clone()).unwrap()
}

fn hashes(ids: &[u32]) -> Vec<crate::core::types::BlockHash> {
    let (mut chain, mut hashes) = (TokenChain::root("m"), Vec::new());
    chain.extend(&mut hashes, ids);
    hashes
}

#[test]
fn templates_and_tokenizers_agree_with_their_references() {
    let exact = exact();
    for case in golden() {
        let text = exact.template().render(case["body"].to_string().as_bytes()).unwrap();
        assert_eq!(text, case["text"].as_str().unwrap());
        assert_eq!(exact.tokenizer().encode(&text).unwrap(), ids(&case));
        let counted = exact.count(None, "m", case["body"].to_string().as_bytes()).unwrap();
        assert_eq!((counted.input_len, &*counted.chain), (ids(&case).len() as u64, &*hashes(&ids(&case))));
    }
}

/// The turns of one conversation, whose template drops the reasoning of earlier ones: counts stay exact, what is
/// shared ends where the template rewrote, and only the rest is read.
#[test]
fn a_lane_reads_only_what_it_does_not_share() {
    let (exact, lane) = (exact(), SessionId::new("scope/lane"));
    let turns: Vec<Value> = golden().into_iter().filter(|case| case["body"].get("tools").is_none()).collect();
    let mut before: Option<Vec<u32>> = None;
    for case in &turns {
        let body = case["body"].to_string();
        let counted = exact.count(Some(&lane), "m", body.as_bytes()).unwrap();
        let ids = ids(case);
        assert_eq!((counted.input_len, &*counted.chain), (ids.len() as u64, &*hashes(&ids)));
        if let Some(before) = &before {
            let shared = before.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            assert!(Exact::read(&counted) < case["text"].as_str().unwrap().len(), "nothing was known");
            let held = counted.input_len - counted.append_len;
            assert_eq!(held, (shared / 24 * 24) as u64, "no answer is credited that was rewritten");
        }
        // Its answer is as long as nothing that follows could be.
        exact.commit(&lane, &counted, Some(100_000), None);
        before = Some(ids);
    }
    // The same again: all of it is held.
    let body = turns.last().unwrap()["body"].to_string();
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
