use super::*;

fn key(i: usize) -> String {
    format!("session-{i}")
}

fn open(desk: &mut Desk, id: &str, text: &str) -> Turn {
    desk.chat(&[("x-session-id", id)], &agent(&[user(text)]))
}

#[test]
fn records_are_bounded_and_the_oldest_go() {
    let mut desk = desk();
    desk.registry = Registry::new(Limits { records: 10, ..Limits::default() });
    for i in 0..50 {
        open(&mut desk, &key(i), "a");
    }
    assert!(desk.registry.len() <= 11, "{}", desk.registry.len());
    assert_eq!(open(&mut desk, &key(0), "a").how, How::New);
    assert_eq!(open(&mut desk, &key(49), "a").how, How::Retry);
}

#[test]
fn lanes_of_a_group_are_bounded() {
    let mut desk = desk();
    for i in 0..100 {
        desk.chat(&[("x-litellm-trace-id", "g")], &agent(&[user(&format!("task {i}"))]));
    }
    assert_eq!(desk.registry.len(), 64);
    let newest = desk.chat(&[("x-litellm-trace-id", "g")], &agent(&[user("task 99")]));
    assert_eq!((newest.how, newest.lane), (How::Retry, 100));
    let oldest = desk.chat(&[("x-litellm-trace-id", "g")], &agent(&[user("task 0")]));
    assert_eq!(oldest.how, How::New);
}

#[test]
fn an_unused_lane_is_forgotten() {
    let mut desk = desk();
    let ttl = Limits::default().ttl;
    open(&mut desk, "s", "a");
    desk.now += ttl - 10;
    assert_eq!(open(&mut desk, "s", "a").how, How::Retry);
    desk.now += ttl + 1;
    assert_eq!(open(&mut desk, "s", "a").how, How::New);
    assert_eq!(desk.registry.len(), 1);
}

#[test]
fn a_resting_lane_is_still_found() {
    let mut desk = desk();
    desk.registry = Registry::new(Limits { live: 2, ..Limits::default() });
    for i in 0..8 {
        open(&mut desk, &key(i), "a");
    }
    assert!(desk.registry.live() <= 3, "{}", desk.registry.live());
    let headers = [("x-session-id", "session-0")];
    let next = desk.chat(&headers, &agent(&[user("a"), said("b"), user("c")]));
    assert_eq!((next.how, next.t, next.reuse_items), (How::Extend, 1, 3));
    let rewritten = desk.chat(&[("x-session-id", "session-1")], &agent(&[user("z"), said("b")]));
    assert_eq!((rewritten.how, rewritten.t, rewritten.reuse_items), (How::Rewrite, 1, 2));
    desk.now += Limits::default().rest + 1;
    for _ in 0..4 {
        desk.registry.sweep(desk.now);
    }
    assert_eq!((desk.registry.live(), desk.registry.hints.len()), (0, 0));
}

#[test]
fn minted_ids_are_bounded() {
    let mut desk = desk();
    desk.registry = Registry::new(Limits { records: 10, ..Limits::default() });
    for i in 0..50 {
        let id = format!("call_{i:08}");
        desk.chat_minting(&[("x-session-id", "s")], &agent(&[user(&key(i))]), &[&id]);
    }
    assert_eq!(desk.registry.minted.len(), 10);
}

#[test]
fn late_commits_of_forgotten_lanes_change_nothing() {
    let mut desk = desk();
    desk.registry = Registry::new(Limits { records: 1, ..Limits::default() });
    let old = desk.begin("/v1/chat/completions", &[("x-session-id", "a")], &agent(&[user("x")]));
    for i in 0..5 {
        open(&mut desk, &key(i), "a");
    }
    let before = desk.registry.len();
    desk.registry.commit(&old, &Answer { ok: true, ..Answer::default() }, desk.now);
    assert_eq!(desk.registry.len(), before);
    assert_eq!(open(&mut desk, "a", "x").how, How::New);
}

#[test]
fn a_record_at_rest_is_small() {
    let bytes = size_of::<super::super::slots::Slot>();
    assert!(bytes <= 112, "{bytes}");
}

#[test]
fn reading_needs_no_lock_for_long() {
    let registry = std::sync::Mutex::new(Registry::new(Limits::default()));
    let headers = [("x-session-id", &b"s"[..])];
    let mut turns = Vec::new();
    for messages in [&[user("a")][..], &[user("a"), said("b"), user("c")]] {
        let body = agent(messages).to_string();
        let incoming =
            Incoming { path: "/v1/chat/completions", headers: Headers(&headers), body: body.as_bytes() };
        let request = Request::read(&incoming, &registry).expect("good");
        assert_eq!(request.fields().model, "m");
        turns.push(registry.lock().expect("a lock").place(&request, 1));
    }
    assert_eq!((turns[1].how, &turns[1].session), (How::Extend, &turns[0].session));
}
