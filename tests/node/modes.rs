//! Every way to serve a turn gives what a cold worker gives, and does what the plan says.

use kvc_router::core::types::Mode;
use kvc_router::wire::plan::Report;

use super::world::*;

/// Tokens of the prompt as the worker counts it, from the report.
fn sum(report: &Report) -> u64 {
    report.reused + report.transferred + report.computed
}

#[tokio::test]
async fn seed_direct_delta_and_restart_of_a_conversation() {
    let (p, d) = (prefill().await, decode().await);
    let mut chat = Chat::new(words("first", 2000));
    let (mode, answer) = turn(&d, Some(&p), "t0", "s", 0, &chat).await;
    let text = answer.text();
    assert_eq!((mode, &text), (Mode::Seed, &chat.reference()));
    let (prompt, out, cached) = answer.usage();
    let report = answer.report();
    let whole = prompt / 24 * 24;
    assert_eq!((report.reused, report.transferred, report.computed), (0, whole, prompt - whole));
    assert_eq!((report.computed_remote, cached, sum(&report)), (whole, 0, prompt));
    assert_eq!(out, text.len() as u64 / 4);

    // Direct: everything said so far is D's own; only the append is computed.
    chat.say("assistant", text).say("user", words("second", 100));
    let held = (prompt + out) / 24 * 24;
    let (mode, answer) = turn(&d, Some(&p), "t1", "s", 1, &chat).await;
    assert_eq!((mode, answer.text()), (Mode::Direct, chat.reference()));
    let report = answer.report();
    let (prompt, _, cached) = answer.usage();
    assert_eq!((report.reused, report.transferred, report.computed), (held, 0, prompt - held));
    assert_eq!(cached, held);

    // A large append: D keeps its prefix, P computes and sends the missing range only.
    chat.say("assistant", answer.text()).say("user", words("large", 9000));
    let (mode, answer) = turn(&d, Some(&p), "t2", "s", 2, &chat).await;
    assert_eq!((mode, answer.text()), (Mode::Reseed, chat.reference()));
    let report = answer.report();
    assert!(report.reused > held && report.transferred >= 9000 / 24 * 24 && report.computed < 24);
    assert_eq!(sum(&report), answer.usage().0);

    at_rest(&d).await;
    at_rest(&p).await;
}

#[tokio::test]
async fn local_fallback_and_plain_requests() {
    let d = decode().await;
    let mut chat = Chat::new(words("local", 1500));
    let (mode, answer) = turn(&d, None, "t0", "s", 0, &chat).await;
    assert_eq!((mode, answer.text()), (Mode::Seed, chat.reference()));
    let report = answer.report();
    assert_eq!((report.reused, report.transferred, report.computed), (0, 0, answer.usage().0));

    chat.say("assistant", answer.text()).say("user", "and now without admission");
    let answer = planned(&d, &fallback("t1", Some("s")), chat.body(true)).await;
    assert_eq!(answer.text(), chat.reference());
    assert!(answer.usage().2 > 1500);

    chat.say("assistant", answer.text()).say("user", "plain");
    for _ in 0..2 {
        let answer = plain(&d, chat.body(false)).await;
        assert_eq!(answer.text(), chat.reference());
    }
    // The second time everything but the tail was there, and the plain turns share one session.
    let answer = plain(&d, chat.body(false)).await;
    assert_eq!(answer.report().computed, answer.usage().0 % 24);
    assert_eq!(d.engine().with(|s, _| s.ledger.residency().sessions().len()), 2);
    at_rest(&d).await;
}

#[tokio::test]
async fn a_one_shot_turn_leaves_nothing() {
    let d = decode().await;
    let chat = Chat::new(words("once", 300));
    let answer = planned(&d, &fallback("t", None), chat.body(false)).await;
    assert_eq!(answer.text(), chat.reference());
    at_rest(&d).await;
    assert_eq!(d.engine().with(|s, _| s.pool.used()), 0);
}

#[tokio::test]
async fn a_poisoned_block_changes_the_text() {
    let d = decode().await;
    let mut chat = Chat::new(words("poison", 500));
    let (_, answer) = turn(&d, None, "t0", "s", 0, &chat).await;
    assert_eq!(answer.text(), chat.reference());
    assert!(d.poison(chat.chain()[7]));
    chat.say("assistant", answer.text()).say("user", "go on");
    let (mode, answer) = turn(&d, None, "t1", "s", 1, &chat).await;
    assert_eq!(mode, Mode::Direct);
    assert_ne!(answer.text(), chat.reference());
    assert_eq!(answer.text().len(), chat.reference().len());
}

/// Poison travels: a wrong block in P's cache gives a wrong text at D, so nothing recomputes it in silence.
#[tokio::test]
async fn a_poisoned_block_at_p_changes_the_text_at_d() {
    let (p, d, e) = (prefill().await, decode().await, decode().await);
    let chat = Chat::new(words("both", 500));
    let (_, answer) = turn(&d, Some(&p), "t0", "s", 0, &chat).await;
    assert_eq!(answer.text(), chat.reference());
    assert!(p.poison(chat.chain()[3]));
    let (_, answer) = turn(&e, Some(&p), "t1", "s", 1, &chat).await;
    assert_ne!(answer.text(), chat.reference());
    assert_eq!((answer.report().computed_remote, answer.usage().2), (0, answer.usage().0 / 24 * 24));
}

#[tokio::test]
async fn two_seeds_that_share_a_prefix_at_the_same_time() {
    let (p, d) = (prefill().await, decode().await);
    let system = words("system", 3000);
    let chats: Vec<Chat> = (0..4)
        .map(|i| {
            let mut chat = Chat::default();
            chat.say("system", system.clone()).say("user", format!("question {i}"));
            chat
        })
        .collect();
    let ids: Vec<String> = (0..4).map(|i| format!("s{i}")).collect();
    let turns = chats.iter().zip(&ids).enumerate().map(|(i, (chat, id))| {
        // Two by P, two computed at D, all at once.
        turn(&d, (i % 2 == 0).then_some(&p), id, id, 0, chat)
    });
    for ((_, answer), chat) in futures_util::future::join_all(turns).await.iter().zip(&chats) {
        assert_eq!(answer.text(), chat.reference());
        assert_eq!(sum(&answer.report()), answer.usage().0);
    }
    at_rest(&d).await;
    at_rest(&p).await;
    // Shared once they are at rest.
    let (used, sessions) = d.engine().with(|s, _| (s.pool.used(), s.ledger.residency().session_tokens()));
    assert!((used as u64) * 24 < sessions / 2, "{used} blocks for {sessions} tokens");
}

#[tokio::test]
async fn max_tokens_cuts_and_says_so() {
    let d = decode().await;
    let mut chat = Chat::new("short");
    chat.max_tokens = Some(5);
    let answer = plain(&d, chat.body(false)).await;
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length");
    assert_eq!((answer.usage().1, answer.text()), (5, chat.reference()));
    chat.max_tokens = None;
    let answer = plain(&d, chat.body(true)).await;
    let events = answer.events();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer.usage().1, events.len() as u64 - 3);
}

/// A request that insists on a tool gets a call, the text before it is held, and the session is spared as one
/// that comes back soon.
#[tokio::test]
async fn an_insisted_tool_is_called() {
    let d = decode().await;
    let mut chat = Chat::new(words("tools", 300));
    chat.tools = true;
    for stream in [false, true] {
        let id = format!("t{stream}");
        let answer = planned(&d, &fallback(&id, Some("s")), chat.body(stream)).await;
        assert_eq!(answer.text(), chat.reference());
        let call = if stream {
            let events = answer.events();
            assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "tool_calls");
            events[events.len() - 3]["choices"][0]["delta"]["tool_calls"][0].clone()
        } else {
            assert_eq!(answer.json()["choices"][0]["finish_reason"], "tool_calls");
            answer.json()["choices"][0]["message"]["tool_calls"][0].clone()
        };
        assert_eq!(
            (call["function"]["name"].as_str(), call["type"].as_str()),
            (Some("ls"), Some("function"))
        );
    }
    // The echoed answer, call and all, is an append.
    let answer = planned(&d, &fallback("t2", Some("s")), chat.body(false)).await;
    let (prompt, out, _) = answer.usage();
    chat.messages.push(answer.json()["choices"][0]["message"].clone());
    chat.say("user", "go on");
    let (mode, answer) = turn(&d, None, "t3", "s", 1, &chat).await;
    assert_eq!((mode, answer.text()), (Mode::Direct, chat.reference()));
    assert_eq!(answer.report().reused, (prompt + out) / 24 * 24);
}
