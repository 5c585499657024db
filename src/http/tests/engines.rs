//! The whole gateway in front of scripted engines that know nothing of it, with the books kept here.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use super::rig::Rig;
use crate::engines::fake::{self, Seen};
use crate::settings::{Layers, Settings};
use crate::{Router, RouterHandle};

/// A gateway in front of engines.
pub(super) async fn front(flags: &[(&str, String)]) -> (Rig, RouterHandle) {
    let mut layers = Layers::default();
    let own = [("http.listen", "127.0.0.1:0".to_owned()), ("http.workers", "1".to_owned())];
    layers.flags.extend(own.iter().chain(flags).map(|(key, value)| ((*key).to_owned(), value.clone())));
    let router = Router::start(&Settings::load(&layers).unwrap().settings).await.unwrap();
    let rig = Rig::front(router.serve().unwrap());
    (rig, router)
}

/// A conversation of so many turns: long enough to be placed, each turn the one before and more.
pub(super) fn conversation(name: &str, turns: usize) -> Value {
    let mut messages =
        vec![json!({"role": "system", "content": format!("{name} {}", "be brief ".repeat(600))})];
    for turn in 0..turns {
        messages.push(json!({"role": "user", "content": format!("question {turn}")}));
        if turn + 1 < turns {
            messages.push(json!({"role": "assistant", "content": format!("answer {turn}")}));
        }
    }
    json!({"model": "m", "messages": messages})
}

pub(super) fn usage(prompt: u64, cached: u64) -> String {
    json!({"id": "c", "object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop",
        "message": {"role": "assistant", "content": "answer"}}], "usage": {"prompt_tokens": prompt,
        "completion_tokens": 3, "total_tokens": prompt + 3, "prompt_tokens_details": {"cached_tokens": cached}}})
    .to_string()
}

type Bodies = Arc<Mutex<Vec<(u32, Value)>>>;

/// A llama.cpp of two slots that notes what it is asked.
async fn llama(place: u32, bodies: &Bodies) -> String {
    let bodies = bodies.clone();
    fake::engine(move |line, seen: &Seen| match line {
        "POST /v1/chat/completions" => {
            bodies.lock().unwrap().push((place, serde_json::from_slice(&seen.body).unwrap()));
            Some((200, usage(1500, 1400)))
        }
        line => fake::llama(line, 2, 8192, 1),
    })
    .await
}

async fn turn(rig: &Rig, name: &str, turns: usize) -> (String, String, String) {
    let header = format!("x-session-id: {name}\r\n");
    let answer = rig.post(&header, conversation(name, turns).to_string()).await;
    assert_eq!(answer.status(), 200, "{}", answer.body);
    let header = |name| answer.header(name).to_owned();
    (header("x-kvc-mode"), header("x-kvc-reason"), header("x-kvc-worker"))
}

#[actix_web::test]
async fn sessions_stay_with_their_engine_and_in_their_slot() {
    let bodies = Bodies::default();
    let (a, b) = (llama(0, &bodies).await, llama(1, &bodies).await);
    let flags = [("fleet.engine", "openai".to_owned()), ("fleet.decode", format!("http://{a},http://{b}"))];
    let (rig, router) = front(&flags).await;
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    let mut homes = Vec::new();
    for name in ["one", "two", "three"] {
        let (mode, reason, worker) = turn(&rig, name, 1).await;
        assert_eq!((mode.as_str(), reason.as_str()), ("seed", "local"));
        homes.push(worker);
    }
    for turns in 2..5 {
        for (name, home) in ["one", "two", "three"].iter().zip(&homes) {
            let (mode, reason, worker) = turn(&rig, name, turns).await;
            assert_eq!((mode.as_str(), reason.as_str(), &worker), ("direct", "append", home));
        }
    }
    // Each session always used the same slot, and no other session of its engine did.
    let mut slots = std::collections::BTreeMap::new();
    for (place, body) in bodies.lock().unwrap().iter() {
        assert_eq!(body["cache_prompt"], true);
        let text = body["messages"][0]["content"].as_str().unwrap();
        let name = text.split(' ').next().unwrap().to_owned();
        let slot = (*place, body["id_slot"].as_u64().unwrap());
        assert_eq!(*slots.entry(name).or_insert(slot), slot);
    }
    let distinct: std::collections::BTreeSet<_> = slots.values().collect();
    assert_eq!(distinct.len(), 3);
    let workers = rig.get("/admin/workers").await.json();
    let engine = &workers["workers"][0]["engine"];
    assert_eq!((&engine["kind"], &engine["k_d_from"]), (&json!("openai"), &json!("engine")), "{workers}");
    assert_eq!(workers["workers"][0]["load"]["k_d"], 16384);
    assert_eq!(engine["books"]["leases"], 0);
    assert_eq!(rig.get("/v1/models").await.json()["data"][0]["id"], "m");
    router.stop().await;
}

/// An engine that dies takes its sessions' KV along: the next turn is served elsewhere, and the books are empty.
#[actix_web::test]
async fn a_turn_whose_engine_dies_is_placed_anew() {
    let bodies = Bodies::default();
    let b = llama(1, &bodies).await;
    // Up, and then it closes every turn's connection.
    let a = fake::engine(|line, _| fake::llama(line, 2, 8192, 1)).await;
    let flags = [("fleet.engine", "openai".to_owned()), ("fleet.decode", format!("http://{a},http://{b}"))];
    let (rig, router) = front(&flags).await;
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    for turns in 1..4 {
        let (_, _, worker) = turn(&rig, "one", turns).await;
        assert_eq!(worker, "d1");
    }
    let workers = rig.get("/admin/workers").await.json();
    for worker in workers["workers"].as_array().unwrap() {
        assert_eq!(worker["engine"]["books"]["leases"], 0, "{workers}");
        assert_eq!(worker["inflight"], 0, "{workers}");
    }
    router.stop().await;
}

#[actix_web::test]
async fn an_engines_own_refusal_reaches_the_client_and_leaves_nothing() {
    let too_long = r#"{"error":{"code":400,"message":"the request exceeds the available context size"}}"#;
    let a = fake::engine(move |line, _| match line {
        "POST /v1/chat/completions" => Some((400, too_long.into())),
        line => fake::llama(line, 2, 8192, 1),
    })
    .await;
    let (rig, router) =
        front(&[("fleet.engine", "openai".to_owned()), ("fleet.decode", format!("http://{a}"))]).await;
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    let answer = rig.post("", conversation("one", 1).to_string()).await;
    assert_eq!((answer.status(), answer.body.as_str()), (400, too_long));
    assert_eq!(answer.header("x-kvc-mode"), "failed");
    let workers = rig.get("/admin/workers").await.json();
    assert_eq!(workers["workers"][0]["engine"]["books"]["leases"], 0, "{workers}");
    assert_eq!(workers["workers"][0]["load"]["used"], 0, "{workers}");
    let mut wrong = conversation("one", 1);
    wrong["model"] = json!("other");
    assert_eq!(rig.post("", wrong.to_string()).await.status(), 404);
    router.stop().await;
}
