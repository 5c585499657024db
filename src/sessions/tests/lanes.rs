use proptest::prelude::*;
use serde_json::json;

use super::*;

const ID: &[(&str, &str)] = &[("x-session-id", "s-1")];
const GROUP: &[(&str, &str)] = &[("x-litellm-trace-id", "g-1")];

fn is(turn: &Turn, lane: u32, how: How, t: u64) {
    assert_eq!((turn.lane, turn.how, turn.t), (lane, how, t), "{turn:?}");
}

#[test]
fn a_failed_seed_stays_zero() {
    let mut desk = desk();
    let body = agent(&[user("go")]);
    let first = desk.begin("/v1/chat/completions", ID, &body);
    desk.registry.commit(&first, &Answer::default(), 1);
    let again = desk.chat(ID, &body);
    is(&again, 1, How::Retry, 0);
    assert_eq!(again.append_bytes, 0);
    // Nothing was committed yet: all of it is to be computed.
    assert_eq!(again.append_len, again.input_len);
    is(&desk.chat(ID, &body), 1, How::Retry, 0);
    is(&desk.chat(ID, &agent(&[user("go"), said("ok"), user("on")])), 1, How::Extend, 1);
}

#[test]
fn after_a_cut_stream_the_client_adds_what_it_had() {
    let mut desk = desk();
    desk.chat(ID, &agent(&[user("go")]));
    let cut = agent(&[user("go"), said("a"), user("b")]);
    desk.begin("/v1/chat/completions", ID, &cut);
    let turn = desk.chat(ID, &agent(&[user("go"), said("a"), user("b"), said("half")]));
    is(&turn, 1, How::Extend, 1);
    assert_eq!((turn.reuse_items, turn.append_items), (5, 1));
}

#[test]
fn exact_ids_follow_rewrites_and_others_fork() {
    let long = [user("a"), said("b"), user("c"), said("d"), user("e")];
    let edited = [user("a"), said("other"), user("c"), said("d"), user("e"), said("f"), user("g")];
    for (headers, expected) in [(ID, How::Rewrite), (GROUP, How::New), (&[][..], How::New)] {
        let mut desk = desk();
        desk.chat(headers, &agent(&long));
        let turn = desk.chat(headers, &agent(&edited));
        assert_eq!(turn.how, expected, "{headers:?}");
        assert_eq!((turn.lane, turn.t), if expected == How::New { (2, 0) } else { (1, 1) });
        assert_eq!(turn.reuse_items, if expected == How::New { 0 } else { 3 });
        if expected == How::New {
            assert_eq!(turn.parent.as_deref(), Some(desk_public(&turn)).map(|p| p.trim_end_matches(".2")));
        }
    }
}

fn desk_public(turn: &Turn) -> &str {
    turn.session.public()
}

#[test]
fn a_fork_that_adds_a_tool_is_a_lane_of_its_own() {
    let mut desk = desk();
    desk.chat(ID, &agent(&[user("a")]));
    let mut body = agent(&[user("a"), said("b"), user("c")]);
    body["tools"]
        .as_array_mut()
        .expect("tools")
        .push(json!({"type": "function", "function": {"name": "more"}}));
    let fork = desk.chat(ID, &body);
    is(&fork, 2, How::New, 0);
    assert_eq!((fork.parent.as_deref(), fork.session.public()), (Some("s-1"), "s-1.2"));
    // Both go on, each on its own.
    is(&desk.chat(ID, &agent(&[user("a"), said("b"), user("x")])), 1, How::Extend, 1);
}

#[test]
fn tail_rewrites() {
    // aider: the reminder leaves the last message when the next one comes, and there is no id.
    let mut desk = desk();
    let reminded = |text: &str| user(&format!("{text}\n\nReply with edits only."));
    is(&desk.chat(&[], &plain(&[reminded("fix")])), 1, How::New, 0);
    is(&desk.chat(&[], &plain(&[user("fix"), said("ok"), reminded("more")])), 1, How::TailRewrite, 1);
    let third = plain(&[user("fix"), said("ok"), user("more"), said("ok"), reminded("yet more")]);
    let turn = desk.chat(&[], &third);
    is(&turn, 1, How::TailRewrite, 2);
    assert_eq!(turn.reuse_items, 3);
    // Another conversation with the same system prompt is not a rewrite of the first one.
    let other = desk.chat(&[], &plain(&[user("something else")]));
    assert_eq!(other.how, How::New);
    assert_ne!(other.session, turn.session);
    let other2 = desk.chat(&[], &plain(&[user("third thing"), said("x"), user("y")]));
    assert_eq!(other2.how, How::New);
    // Two items back is a tail, three is not.
    let base = [user("a"), said("b"), user("c"), said("d")];
    desk.chat(GROUP, &agent(&base));
    is(&desk.chat(GROUP, &agent(&[user("a"), said("b"), user("C")])), 1, How::TailRewrite, 1);
    let mut desk = super::desk();
    desk.chat(GROUP, &agent(&base));
    is(&desk.chat(GROUP, &agent(&[user("a"), said("B")])), 2, How::New, 0);
}

#[test]
fn the_newest_call_id_keeps_the_lane() {
    let mut desk = desk();
    let (a, b) = ("call_aaaaaaaa1", "call_bbbbbbbb2");
    desk.chat_minting(&[], &agent(&[user("<date/> x")]), &[a]);
    desk.chat_minting(&[], &agent(&[user("<date/> x"), called(a), result(a, "1")]), &[b]);
    let rewritten =
        agent(&[user("y"), called(a), result(a, "1"), called(b), result(b, "2"), said("z"), user("n")]);
    let turn = desk.chat(&[], &rewritten);
    is(&turn, 1, How::CallId, 2);
    assert_eq!(turn.reuse_items, 2);
    // An older id says only where a fork began.
    let old = agent(&[user("q"), called(a), result(a, "1"), said("w"), user("e")]);
    assert_eq!(desk.chat(&[], &old).how, How::New);
}

#[test]
fn numbered_and_shared_call_ids_say_nothing() {
    for id in ["functions.bash:0", "call_0"] {
        let mut desk = desk();
        desk.chat_minting(&[], &agent(&[user("a")]), &[id]);
        let turn = desk.chat(&[], &agent(&[user("b"), called(id), result(id, "1")]));
        assert_eq!(turn.how, How::New, "{id}");
    }
    let mut desk = desk();
    let id = "call_aaaaaaaa1";
    desk.chat_minting(&[], &agent(&[user("a")]), &[id]);
    desk.chat_minting(&[], &agent(&[user("b")]), &[id]);
    assert_eq!(desk.chat(&[], &agent(&[user("c"), called(id), result(id, "1")])).how, How::New);
}

#[test]
fn call_ids_do_not_cross_ids() {
    let mut desk = desk();
    let id = "call_aaaaaaaa1";
    desk.chat_minting(ID, &agent(&[user("a")]), &[id]);
    let fork = desk.chat(&[("x-session-id", "s-2")], &agent(&[user("b"), called(id), result(id, "1")]));
    assert_eq!((fork.how, fork.key.as_deref()), (How::New, Some("s-2")));
}

#[test]
fn side_requests() {
    let mut desk = desk();
    let main = desk.chat(ID, &agent(&[user("a")]));
    assert!(!main.one_shot);
    // opencode's compaction: the history without tools, unmarked, under the same id.
    let aux = desk.chat(ID, &plain(&[user("a"), said("b"), user("Summarise")]));
    assert_eq!(
        (aux.class, aux.one_shot, aux.lane, aux.parent.as_deref()),
        (Class::Aux, true, 2, Some("s-1"))
    );
    // A declared side request is never the main lane, even when it extends it.
    let claude = ("x-claude-code-request-class", "auxiliary");
    let aux = desk.chat(&[ID[0], claude], &agent(&[user("a"), said("b"), user("Suggest")]));
    assert_eq!((aux.class, aux.one_shot, aux.lane), (Class::Aux, true, 3));
    is(&desk.chat(ID, &agent(&[user("a"), said("b"), user("c")])), 1, How::Extend, 1);
    // Compaction, then the conversation goes on from its head and the summary.
    let compact = [ID[0], ("x-claude-code-request-class", "compaction")];
    let turn = desk.chat(&compact, &agent(&[user("a"), said("b"), user("c"), said("d"), user("Compact")]));
    assert_eq!((turn.class, turn.lane, turn.one_shot), (Class::Compaction, 4, true));
    is(&desk.chat(ID, &agent(&[user("summary"), user("go on")])), 1, How::Rewrite, 2);
}

#[test]
fn a_small_lane_waits_for_its_second_request() {
    let mut desk = desk();
    let body = |messages: &[Value]| json!({"model": "m", "messages": messages});
    let first = desk.chat(ID, &body(&[user("hi")]));
    assert_eq!((first.class, first.one_shot), (Class::Ephemeral, true));
    assert!(desk.chat(ID, &body(&[user("hi")])).one_shot);
    let second = desk.chat(ID, &body(&[user("hi"), said("yo"), user("more")]));
    assert_eq!((second.class, second.one_shot, second.t), (Class::Main, false, 1));
}

#[test]
fn responses_by_id() {
    let mut desk = desk();
    let sys = "You are. ".repeat(600);
    let first = desk.begin("/v1/responses", &[], &json!({"model": "m", "instructions": sys, "input": "one"}));
    let answer = Answer {
        ok: true,
        prompt_tokens: Some(1300),
        completion_tokens: Some(100),
        responses: &["resp_1"],
        ..Answer::default()
    };
    desk.registry.commit(&first, &answer, 1);
    let body = json!({"model": "m", "instructions": sys, "input": "two", "previous_response_id": "resp_1"});
    let next = desk.begin("/v1/responses", &[], &body);
    is(&next, 1, How::PrevId, 1);
    assert_eq!(next.stateful.map(|s| (s.field, s.known)), Some(("previous_response_id", true)));
    assert_eq!((next.reuse_items, next.append_items), (2, 1));
    assert!(next.input_len > 1400 && next.append_len < 16, "{next:?}");
    assert_eq!(next.chain[..first.chain.len()], first.chain[..]);
    let unknown = json!({"model": "m", "input": "x", "previous_response_id": "resp_9"});
    let turn = desk.begin("/v1/responses", &[], &unknown);
    assert_eq!(turn.stateful.map(|s| s.known), Some(false));
    // Another tenant's response is unknown, too.
    let turn = desk.begin("/v1/responses", &[("authorization", "Bearer other")], &body);
    assert_eq!(turn.stateful.map(|s| s.known), Some(false));
}

#[test]
fn a_conversation_belongs_to_its_lane() {
    let mut desk = desk();
    let body = |input: &str| json!({"model": "m", "input": input, "conversation": "conv_1"});
    let first = desk.begin("/v1/responses", &[], &body("one"));
    assert_eq!(first.stateful.map(|s| (s.field, s.known)), Some(("conversation", false)));
    desk.registry.commit(&first, &Answer { ok: true, ..Answer::default() }, 1);
    let next = desk.begin("/v1/responses", &[], &body("two"));
    is(&next, 1, How::PrevId, 1);
    assert_eq!(next.stateful.map(|s| s.known), Some(true));
}

#[test]
fn tenants_and_models_are_apart_and_keys_exact() {
    let mut desk = desk();
    let body = agent(&[user("a")]);
    let ours = desk.chat(ID, &body);
    let theirs = desk.chat(&[ID[0], ("authorization", "Bearer x")], &body);
    let mut other = body.clone();
    other["model"] = json!("m2");
    let model = desk.chat(ID, &other);
    let longer = desk.chat(&[("x-session-id", "s-12")], &body);
    for turn in [&theirs, &model, &longer] {
        assert_eq!((turn.how, turn.t), (How::New, 0));
        assert_ne!(turn.session, ours.session);
    }
    assert_eq!(ours.session.public(), "s-1");
    assert_ne!(model.chain, ours.chain);
    // A key that looks like another key's second lane.
    let odd = desk.chat(&[("x-session-id", "s-1.2")], &body);
    assert_eq!(odd.session.public(), "s-1.2.1");
}

#[test]
fn bare_prompts_grow_within_their_item() {
    let mut desk = desk();
    let text = "It was a dark and stormy night. ".repeat(200);
    let mut begin = |text: &str| {
        let turn = desk.begin("/v1/completions", &[], &json!({"model": "m", "prompt": text}));
        desk.registry.commit(&turn, &Answer { ok: true, ..Answer::default() }, 1);
        turn
    };
    is(&begin(&text), 1, How::New, 0);
    is(&begin(&text), 1, How::Retry, 0);
    let grown = begin(&format!("{text}And then it rained."));
    is(&grown, 1, How::Extend, 1);
    assert_eq!(grown.append_bytes, 19);
    assert_eq!(begin(&format!("Once upon a time. {text}")).how, How::New);
}

#[test]
fn lengths_follow_usage() {
    let mut desk = desk();
    let body = agent(&[user("a")]);
    let first = desk.begin("/v1/chat/completions", ID, &body);
    assert_eq!(first.append_len, first.input_len);
    let answer =
        Answer { ok: true, prompt_tokens: Some(1000), completion_tokens: Some(40), ..Answer::default() };
    desk.registry.commit(&first, &answer, 1);
    let next =
        desk.begin("/v1/chat/completions", ID, &agent(&[user("a"), said(&"word ".repeat(40)), user("b")]));
    assert!((1040..1060).contains(&next.input_len), "{}", next.input_len);
    assert!(next.append_len <= 24 + 20, "{}", next.append_len);
    assert_eq!(next.shared_blocks, first.ticket.size.bytes as usize / 96);
    // A new lane of the same model starts with what was learned.
    let other = desk.begin("/v1/chat/completions", &[("x-session-id", "s-9")], &body);
    assert!(other.input_len.abs_diff(1000) <= 1, "{}", other.input_len);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn an_extension_stays_on_its_lane(texts in proptest::collection::vec("[a-z]{1,400}", 1..10), keyed in any::<bool>()) {
        let mut desk = desk();
        let headers = if keyed { ID } else { &[][..] };
        let mut messages = vec![user("task")];
        let mut before = desk.chat(headers, &agent(&messages));
        for (t, text) in texts.iter().enumerate() {
            messages.extend([said(text), user(text)]);
            let turn = desk.chat(headers, &agent(&messages));
            prop_assert_eq!((&turn.session, turn.how, turn.t), (&before.session, How::Extend, t as u64 + 1));
            prop_assert!(turn.chain.starts_with(&before.chain));
            prop_assert!(turn.shared_blocks <= before.chain.len() && turn.append_items == 2);
            before = turn;
        }
    }
}
