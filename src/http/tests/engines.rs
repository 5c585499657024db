//! The whole gateway in front of scripted engines that know nothing of it, with the books kept here.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use super::rig::Rig;
use crate::actors::slot::Role;
use crate::engines::fake::{self, Conn, Seen};
use crate::node::beside::Beside;
use crate::settings::{Layers, Settings};
use crate::{Router, RouterHandle};

/// A gateway in front of engines.
pub(super) async fn front(flags: &[(&str, String)]) -> (Rig, RouterHandle) {
    let router = Router::start(&settings(flags)).await.unwrap();
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

/// An engine that keeps conversations names them in its answers: the next turn goes there, and an unknown one nowhere.
#[actix_web::test]
async fn a_conversation_goes_to_the_engine_that_named_it() {
    let bodies = Bodies::default();
    let keeper = async |place: u32| {
        let bodies = bodies.clone();
        fake::engine(move |line, seen: &Seen| match line {
            "POST /v1/responses" => {
                bodies.lock().unwrap().push((place, serde_json::from_slice(&seen.body).unwrap()));
                let answer = json!({"id": "resp_1", "object": "response", "status": "completed", "output": [],
                    "conversation": {"id": format!("conv_{place}")},
                    "usage": {"input_tokens": 1500, "output_tokens": 3, "total_tokens": 1503}});
                Some((200, answer.to_string()))
            }
            line => fake::llama(line, 2, 8192, 1),
        })
        .await
    };
    let (a, b) = (keeper(0).await, keeper(1).await);
    let flags = [
        ("fleet.engine", "openai".to_owned()),
        ("fleet.apis", "chat,responses".to_owned()),
        ("fleet.decode", format!("http://{a},http://{b}")),
    ];
    let (rig, router) = front(&flags).await;
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    let ask = async |conversation: Value| {
        let body = json!({"model": "m", "instructions": "be brief ".repeat(600), "input": "x", "conversation": conversation});
        rig.post_to("/v1/responses", body.to_string()).await
    };
    let first = ask(Value::Null).await;
    assert_eq!(first.status(), 200, "{}", first.body);
    let named = first.json()["conversation"]["id"].clone();
    for conversation in [named.clone(), json!({"id": named})] {
        let next = ask(conversation).await;
        assert_eq!((next.status(), next.header("x-kvc-mode")), (200, "direct"), "{}", next.body);
        assert_eq!(next.header("x-kvc-worker"), first.header("x-kvc-worker"));
    }
    let unknown = ask(json!("conv_9")).await;
    assert_eq!((unknown.status(), &unknown.json()["error"]["param"]), (400, &json!("conversation")));
    let sent: Vec<Value> =
        bodies.lock().unwrap().iter().map(|(_, body)| body["conversation"].clone()).collect();
    assert_eq!(sent, [Value::Null, named.clone(), json!({"id": named})]);
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

/// Settings with these keys.
fn settings(flags: &[(&str, String)]) -> Settings {
    let mut layers = Layers::default();
    let own = [("http.listen", "127.0.0.1:0".to_owned()), ("http.workers", "1".to_owned())];
    layers.flags.extend(own.iter().chain(flags).map(|(key, value)| ((*key).to_owned(), value.clone())));
    Settings::load(&layers).unwrap().settings
}

/// A node beside an engine. Returns its base URL.
fn beside(engine: &str, k_d: u64) -> (Beside, String) {
    let flags = [
        ("fleet.engine", "openai".to_owned()),
        ("fleet.k_d", k_d.to_string()),
        ("node.listen", "127.0.0.1:0".to_owned()),
        ("node.engine_url", format!("http://{engine}")),
    ];
    let (node, serving) = Beside::start(&settings(&flags)).unwrap();
    let url = format!("http://{}", serving.addrs[0]);
    actix_web::rt::spawn(serving.server);
    (node, url)
}

/// An engine whose turns take until they are let go, and how many run and ran at once.
struct Slow {
    addr: String,
    gate: Arc<tokio::sync::Semaphore>,
    running: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

async fn slow() -> Slow {
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let shared = (gate.clone(), running.clone(), most.clone());
    let addr = fake::worker(move |mut conn: Conn| {
        let (gate, running, most) = shared.clone();
        async move {
            while let Some(seen) = conn.request().await {
                let line = seen.head.split(['?', ' ']).take(2).collect::<Vec<_>>().join(" ");
                if line == "POST /v1/chat/completions" {
                    most.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                    gate.acquire().await.unwrap().forget();
                    running.fetch_sub(1, SeqCst);
                    conn.answer(200, &usage(1500, 0)).await;
                    continue;
                }
                let said = fake::llama(&line, 0, 0, 1).filter(|_| line != "GET /props");
                let (status, body) = said.unwrap_or((404, "{}".into()));
                conn.answer(status, &body).await;
            }
        }
    })
    .await;
    Slow { addr, gate, running, most }
}

/// Two gateways, one engine that has room for one of their turns at a time: the node beside it sees to that.
#[actix_web::test]
async fn two_gateways_share_an_engine_without_over_committing_it() {
    let engine = slow().await;
    let (_node, url) = beside(&engine.addr, 2500);
    let flags = [
        ("fleet.engine", "openai".to_owned()),
        ("fleet.admission", "node".to_owned()),
        ("fleet.decode", url.clone()),
    ];
    let ((a, first), (b, second)) = (front(&flags).await, front(&flags).await);
    for router in [&first, &second] {
        assert!(router.turns().all_up(Duration::from_secs(20)).await);
    }
    let both = async { tokio::join!(turn(&a, "one", 1), turn(&b, "two", 1)) };
    let watch = async {
        // One runs, the other waits for room at its gateway.
        let waiting = async |rig: &Rig| {
            let state = rig.get("/admin/workers").await.json();
            state["router"]["waiting"].as_u64().unwrap()
        };
        while engine.running.load(SeqCst) == 0 || waiting(&a).await + waiting(&b).await == 0 {
            tokio::task::yield_now().await;
        }
        engine.gate.add_permits(2);
    };
    let ((one, two), ()) = tokio::join!(both, watch);
    assert_eq!((one.0.as_str(), two.0.as_str()), ("seed", "seed"));
    assert_eq!(engine.most.load(SeqCst), 1);
    // Either gateway finds the session that is there.
    engine.gate.add_permits(4);
    let (_, _, home) = turn(&a, "three", 1).await;
    let (mode, ..) = turn(&a, "three", 2).await;
    assert_eq!((mode.as_str(), home.as_str()), ("direct", "d0"));
    let state = Rig::at(&url).get("/admin/workers").await.json();
    assert_eq!(state["engine"]["books"]["leases"], 0, "{state}");
    first.stop().await;
    second.stop().await;
}

/// The node speaks the protocol of nodes, and its engine's own API to everyone else.
#[actix_web::test]
async fn a_node_beside_an_engine_answers_for_it() {
    let engine = slow().await;
    engine.gate.add_permits(9);
    let (node, url) = beside(&engine.addr, 2500);
    let rig = Rig::at(&url);
    while rig.get("/ready").await.status() != 200 {
        tokio::task::yield_now().await;
    }
    let info = rig.get("/kvc/info").await.json();
    let told = (&info["k_d"], &info["model"], &info["roles"]);
    assert_eq!(told, (&json!(2500), &json!("m"), &json!(["decode"])));
    let body = conversation("x", 1).to_string();
    assert_eq!(rig.post("", &body).await.status(), 200);
    let code = |answer: &super::rig::Answer| answer.json()["error"]["code"].as_str().map(str::to_owned);
    let lease =
        r#"{"leg":"decode","request_id":"r","session":"s","mode":"direct","lease_epoch":1,"reuse_blocks":0}"#;
    let late = rig.post(&format!("x-kvc-plan: {lease}\r\n"), &body).await;
    assert_eq!((late.status(), code(&late).as_deref()), (409, Some("kvc_plan_mismatch")));
    let prefill = r#"{"leg":"prefill","request_id":"r","session":"s","push":{"transfer_id":"","to":"","from_block":0}}"#;
    let wrong = rig.post(&format!("x-kvc-plan: {prefill}\r\n"), &body).await;
    assert_eq!((wrong.status(), code(&wrong).as_deref()), (403, Some("kvc_role")));
    // `input_len` is an estimate: a chain that is longer is believed.
    let admit =
        json!({"request_id": "a", "session": "s", "input_len": 0, "prefix_hashes": [1, 2]}).to_string();
    let kind = "content-type: application/json\r\n";
    let granted = rig.send("POST", "/admit_direct_append", kind, &admit).await.json();
    assert_eq!((&granted["answer"], &granted["mode"]), (&json!("admitted"), &json!("seed")), "{granted}");
    assert_eq!(granted["terms"]["input_len"], 48);
    let call = json!({"request_id": "a", "epoch": info["epoch"]}).to_string();
    for known in [true, false] {
        let released = rig.send("POST", "/kvc/leases/release", kind, &call).await.json();
        assert_eq!(released["known"], known);
    }
    node.drain();
    assert_eq!(rig.get("/ready").await.status(), 503);
    assert_eq!(rig.send("POST", "/admit_direct_append", kind, &admit).await.status(), 503);
}

#[actix_web::test]
async fn a_node_without_its_engine_says_so() {
    let (_node, url) = beside(&fake::nobody().await, 2500);
    let rig = Rig::at(&url);
    for path in ["/ready", "/kvc/info", "/kvc/events"] {
        assert_eq!(rig.get(path).await.status(), 503, "{path}");
    }
    let answer = rig.post("", conversation("x", 1).to_string()).await;
    assert_eq!(answer.status(), 503);
    assert_eq!(answer.json()["error"]["code"], "engine_unavailable");
}

/// A vLLM of 4,000 tokens that notes the turns it is asked for, and returns handles with every answer.
async fn vllm(place: u32, model: &'static str, said: &Bodies) -> String {
    let said = said.clone();
    fake::engine(move |line, seen: &Seen| {
        let handles = r#""kv_transfer_params":{"remote_block_ids":[[1]]}"#;
        let body = match line {
            "GET /health" => String::new(),
            "GET /v1/models" => format!(r#"{{"data":[{{"id":"{model}"}}]}}"#),
            "GET /metrics" => "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"251\"} 1\n".into(),
            "POST /v1/completions" => format!("{{{handles}}}"),
            _ => {
                said.lock().unwrap().push((place, serde_json::from_slice(&seen.body).unwrap()));
                usage(1500, 0).replacen('{', &format!("{{{handles},"), 1)
            }
        };
        Some((200, body))
    })
    .await
}

/// What P computes reaches D by P's handles, and D's KV goes back to P by D's.
#[actix_web::test]
async fn a_vllm_pair_seeds_appends_and_hands_back() {
    let said = Bodies::default();
    let (p, d) = (vllm(0, "m", &said).await, vllm(1, "m", &said).await);
    let flags = [
        ("fleet.engine", "vllm".to_owned()),
        ("fleet.prefill", format!("http://{p}")),
        ("fleet.decode", format!("http://{d}")),
        ("algorithm.tau_append", "1000".to_owned()),
        ("algorithm.d2p_trigger", "commit".to_owned()),
    ];
    let (rig, router) = front(&flags).await;
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    let legs = |from: usize| -> Vec<(u32, Value)> {
        let said = said.lock().unwrap();
        said[from..].iter().map(|(place, body)| (*place, body["kv_transfer_params"].clone())).collect()
    };
    let handles = json!({"remote_block_ids": [[1]]});
    let (mode, reason, _) = turn(&rig, "one", 1).await;
    assert_eq!((mode.as_str(), reason.as_str()), ("seed", "full"));
    assert_eq!(legs(0).len(), 2);
    assert_eq!((legs(0)[0].0, &legs(0)[1]), (0, &(1, handles.clone())));
    // P computed that prompt itself: nothing to hand back. The next turn is D's alone, and goes back.
    let (mode, reason, _) = turn(&rig, "one", 20).await;
    assert_eq!((mode.as_str(), reason.as_str()), ("direct", "append"));
    while said.lock().unwrap().len() < 5 {
        tokio::task::yield_now().await;
    }
    // D is asked as P was: for one token, to keep its blocks.
    let keeps = legs(0)[0].1.clone();
    assert_eq!(legs(2), [(1, Value::Null), (1, keeps), (0, handles)]);
    // P's books have the prompt now, as D's have it beside its answer.
    let used = async |place: usize| {
        rig.get("/admin/workers").await.json()["workers"][place]["load"]["used"].as_u64().unwrap()
    };
    while used(1).await + 48 < used(0).await {
        tokio::task::yield_now().await;
    }
    let workers = rig.get("/admin/workers").await.json()["workers"].clone();
    assert_eq!(workers[0]["load"]["k_d"], 4000);
    // Only D says how long a prompt is; P's books count as D's do.
    let per_block = |place: usize| workers[place]["engine"]["books"]["tokens_per_block"].as_f64();
    assert!(per_block(0) > Some(24.5) && per_block(0) == per_block(1), "{workers}");
    router.stop().await;
}

/// A P with another model is no P of this fleet: turns are served without it.
#[actix_web::test]
async fn a_p_that_does_not_fit_is_left_out() {
    let said = Bodies::default();
    let (p, d) = (vllm(0, "other", &said).await, vllm(1, "m", &said).await);
    let flags = [
        ("fleet.engine", "vllm".to_owned()),
        ("fleet.prefill", format!("http://{p}")),
        ("fleet.decode", format!("http://{d}")),
        ("algorithm.tau_append", "1000".to_owned()),
    ];
    let (rig, router) = front(&flags).await;
    let p = async || rig.get("/admin/workers").await.json()["workers"][1].clone();
    while !router.turns().is_ready() || p().await["health"] != "down" {
        tokio::task::yield_now().await;
    }
    let error = p().await["error"].as_str().unwrap().to_owned();
    assert!(error.ends_with(r#"it serves ["other"], the decode workers ["m"]"#), "{error}");
    let (mode, reason, _) = turn(&rig, "one", 1).await;
    assert_eq!((mode.as_str(), reason.as_str()), ("seed", "local"));
    router.stop().await;
}

/// A worker that has left has no say in what fits: a P is held against the D workers that are there.
#[actix_web::test]
async fn a_removed_worker_is_forgotten() {
    let said = Bodies::default();
    let (p, old, new) = (vllm(0, "b", &said).await, vllm(1, "a", &said).await, vllm(2, "b", &said).await);
    let flags = [
        ("fleet.engine", "vllm".to_owned()),
        ("fleet.prefill", format!("http://{p}")),
        ("fleet.decode", format!("http://{old}")),
    ];
    let (rig, router) = front(&flags).await;
    let health = async |name: &str| {
        let workers = rig.get("/admin/workers").await.json()["workers"].clone();
        let found = workers.as_array().unwrap().iter().find(|w| w["name"] == name).cloned();
        found.map(|worker| worker["health"].as_str().unwrap().to_owned())
    };
    while health("p0").await.as_deref() != Some("down") {
        tokio::task::yield_now().await;
    }
    assert!(router.turns().remove_worker("d0", Duration::ZERO));
    while health("d0").await.is_some() {
        tokio::task::yield_now().await;
    }
    router.turns().add_worker(&format!("http://{new}"), Role::Decode, None).unwrap();
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    router.stop().await;
}
