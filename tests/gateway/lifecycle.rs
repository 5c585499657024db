//! Workers come and go, settings change, the gateway ends and comes back, while turns run.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::*;

async fn call(world: &World, method: &str, path: &str, body: &str) -> (StatusCode, Value) {
    let request = Request::builder().method(method).uri(format!("{}{path}", world.url));
    let (status, _, body) = send(request, body.to_owned().into()).await;
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

fn grown(mut body: Value, answer: &Value) -> Value {
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(answer["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": "go on"}));
    body
}

/// The worker a session is on, and the body of its next turn.
async fn first_turn(world: &World, session: &str, words: usize) -> (String, Value) {
    let mut body = prompt(words);
    body["messages"][0]["content"] = format!("{session} {}", body["messages"][0]["content"]).into();
    let (status, headers, answer) = world.ask(session, &body, None).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    (headers["x-kvc-worker"].to_str().unwrap().to_owned(), grown(body, &answer))
}

async fn until(what: impl AsyncFn() -> bool) {
    while !what().await {
        tokio::task::yield_now().await;
    }
}

/// Above `http.max_connections` nobody is turned away: a connection waits until another one closes.
#[actix_web::test]
async fn connections_above_the_bound_wait() {
    let world = World::start(&[("http.max_connections", "1")]).await;
    let address = world.url.strip_prefix("http://").unwrap();
    let asks = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
    let mut first = TcpStream::connect(address).await.unwrap();
    let mut answer = [0; 1024];
    first.write_all(asks).await.unwrap();
    assert!(first.read(&mut answer).await.unwrap() > 0);
    let mut second = TcpStream::connect(address).await.unwrap();
    second.write_all(asks).await.unwrap();
    // The gateway goes on serving whom it has, not whom it has no place for.
    for _ in 0..20 {
        first.write_all(asks).await.unwrap();
        assert!(first.read(&mut answer).await.unwrap() > 0);
        assert_eq!(second.try_read(&mut answer).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
    drop(first);
    let read = second.read(&mut answer).await.unwrap();
    assert!(answer[..read].starts_with(b"HTTP/1.1 200"));
}

/// A drained worker gets no turn, its sessions move without an error, and it takes turns again when told so.
#[actix_web::test]
async fn a_drained_workers_sessions_move_without_an_error() {
    let world = World::start(&[]).await;
    let (home, body) = first_turn(&world, "me", 3000).await;
    let path = format!("/admin/workers/{home}");
    let (status, state) = call(&world, "PATCH", &path, r#"{"draining":true}"#).await;
    assert_eq!(
        (status, &state["health"], &state["name"]),
        (StatusCode::OK, &json!("draining"), &json!(home))
    );
    let (status, headers, answer) = world.ask("me", &body, None).await;
    assert_eq!((status, mode(&headers)), (StatusCode::OK, "reseed"), "{answer}");
    let away = headers["x-kvc-worker"].to_str().unwrap().to_owned();
    assert_ne!(away, home);
    for other in ["a", "b", "c"] {
        assert_eq!(first_turn(&world, other, 500).await.0, away);
    }
    let (_, state) = call(&world, "PATCH", &path, r#"{"draining":false}"#).await;
    assert_eq!(state["health"], "up");
    call(&world, "PATCH", &format!("/admin/workers/{away}"), r#"{"draining":true}"#).await;
    assert_eq!(first_turn(&world, "d", 500).await.0, home);
    world.assert_clean().await;
}

/// Added over `/admin/workers`, used, removed; a second one under the same URL is somebody else.
#[actix_web::test]
async fn workers_join_and_leave_at_runtime() {
    let world = World::start(&[]).await;
    let third = node("d9", KvRole::Decode).await;
    let ask = json!({"url": third.url(), "role": "decode"}).to_string();
    let (status, joined) = call(&world, "POST", "/admin/workers", &ask).await;
    assert_eq!(
        (status, &joined["url"], &joined["role"]),
        (StatusCode::CREATED, &json!(third.url()), &json!("decode"))
    );
    assert!(joined["inflight"] == 0 && joined["health"].is_string(), "{joined}");
    let name = joined["name"].as_str().unwrap().to_owned();
    let (status, known) = call(&world, "POST", "/admin/workers", &ask).await;
    assert_eq!((status, &known["error"]["code"]), (StatusCode::CONFLICT, &json!("worker_exists")));
    assert!(world.router.turns().all_up(Duration::from_secs(20)).await);
    for old in ["d0", "d1"] {
        let (status, state) = call(&world, "DELETE", &format!("/admin/workers/{old}"), "").await;
        assert_eq!((status, &state["leaving"]), (StatusCode::ACCEPTED, &json!(true)));
    }
    until(async || world.router.turns().workers().await.len() == 2).await;
    let (home, body) = first_turn(&world, "me", 3000).await;
    assert_eq!(home, name);
    let again = json!({"url": world.nodes[0].url(), "role": "decode"}).to_string();
    let (_, back) = call(&world, "POST", "/admin/workers", &again).await;
    assert!(
        back["id"].as_u64() > joined["id"].as_u64() && back["name"] != "d0",
        "ids are never used again: {back}"
    );
    assert!(world.router.turns().all_up(Duration::from_secs(20)).await);
    call(&world, "DELETE", &format!("/admin/workers/{name}"), "").await;
    let (status, headers, answer) = world.ask("me", &body, None).await;
    assert_eq!((status, mode(&headers)), (StatusCode::OK, "reseed"), "{answer}");
    assert_eq!(headers["x-kvc-worker"].to_str().unwrap(), back["name"]);
    world.assert_clean().await;
    third.audit().unwrap();
}

#[actix_web::test]
async fn what_cannot_be_done_to_workers_is_told() {
    let world = World::start(&[]).await;
    let cases = [
        ("POST", "/admin/workers", r#"{"url":"10.0.0.1:80","role":"decode"}"#, 400, "invalid_request"),
        ("POST", "/admin/workers", r#"{"url":"http://x:1","role":"both"}"#, 400, "invalid_request"),
        (
            "POST",
            "/admin/workers",
            r#"{"url":"http://x:1","role":"decode","name":"a b"}"#,
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/admin/workers",
            r#"{"url":"http://x:1","role":"decode","name":"d1"}"#,
            409,
            "worker_exists",
        ),
        ("POST", "/admin/workers", "{", 400, "invalid_request"),
        ("PATCH", "/admin/workers/d0", "{}", 400, "invalid_request"),
        ("PATCH", "/admin/workers/nobody", r#"{"draining":true}"#, 404, "worker_not_found"),
        ("DELETE", "/admin/workers/nobody", "", 404, "worker_not_found"),
        ("DELETE", "/admin/workers/d0?within_s=x", "", 400, "invalid_request"),
        ("POST", "/admin/reload", "", 409, "no_settings_source"),
    ];
    for (method, path, body, status, code) in cases {
        let (got, answer) = call(&world, method, path, body).await;
        assert_eq!(
            (got.as_u16(), answer["error"]["code"].as_str()),
            (status, Some(code)),
            "{method} {path} {body}"
        );
    }
    assert_eq!(world.router.turns().workers().await.len(), 3);
}

/// A turn that runs on a worker that leaves ends there; the worker goes after it.
#[actix_web::test]
async fn a_leaving_worker_finishes_what_runs() {
    let world = World::start(&[("http.workers", "1")]).await;
    let turns = world.router.turns();
    let request = kvc_router::actors::api::TurnRequest {
        session: kvc_router::core::types::SessionId::new("t/s"),
        turn: 0,
        chain: (1..=50).map(kvc_router::core::types::BlockHash).collect(),
        input_len: 1200,
        append_len: 1200,
        max_output: Some(10),
        one_shot: false,
        hint: None,
        explain: false,
    };
    let grant = turns.route(request).await.unwrap();
    let name = grant.plan.decode.name.to_string();
    assert!(turns.remove_worker(&name, Duration::from_secs(600)));
    let state = turns.worker(&name).await.unwrap();
    assert!(state.leaving && state.inflight == 1, "{state:?}");
    drop(grant);
    until(async || turns.worker(&name).await.is_none()).await;
    world.assert_clean().await;
}

/// Reload: workers and limits change while turns run; anything else is refused by name, and then nothing changes.
#[actix_web::test]
async fn a_reload_keeps_running_turns() {
    let world = World::start(&[("http.explain", "true")]).await;
    let (home, body) = first_turn(&world, "me", 3000).await;
    let decode = &world.nodes[..2];
    let (stays, goes) = if home == "d0" { (&decode[1], &decode[0]) } else { (&decode[0], &decode[1]) };
    assert_eq!(goes.info().name, home);
    let base: HashMap<String, String> = HashMap::from([
        ("http.listen".into(), "127.0.0.1:0".into()),
        ("http.workers".into(), "1".into()),
        ("http.explain".into(), "true".into()),
        ("fleet.prefill".into(), world.nodes[2].url()),
        ("fleet.decode".into(), format!("{},{}", decode[0].url(), decode[1].url())),
    ]);
    let now = Arc::new(Mutex::new(base));
    let source = now.clone();
    world.router.read_from(Box::new(move || {
        let flags = source.lock().unwrap().clone().into_iter().collect();
        Settings::load(&Layers { flags, ..Layers::default() }).map(|loaded| loaded.settings)
    }));
    let set = |key: &str, value: &str| now.lock().unwrap().insert(key.into(), value.into());
    let (status, answer) = call(&world, "POST", "/admin/reload", "").await;
    assert_eq!((status, &answer["changed"]), (StatusCode::OK, &json!([])));
    set("fleet.decode", &stays.url());
    set("algorithm.rho", "0.5");
    let (status, answer) = call(&world, "POST", "/admin/reload", "").await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == StatusCode::CONFLICT && message.contains("`algorithm.rho` cannot change"), "{answer}");
    assert!(!world.router.turns().worker(&home).await.unwrap().leaving);
    set("algorithm.rho", "2");
    let (status, answer) = call(&world, "POST", "/admin/reload", "").await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == StatusCode::BAD_REQUEST && message.contains("algorithm.rho = 2"), "{answer}");
    now.lock().unwrap().remove("algorithm.rho");
    set("http.max_inflight", "0");
    assert_eq!(call(&world, "POST", "/admin/reload", "").await.0, StatusCode::BAD_REQUEST);
    set("http.max_inflight", "1");
    let (status, answer) = call(&world, "POST", "/admin/reload", "").await;
    assert_eq!((status, &answer["changed"]), (StatusCode::OK, &json!(["fleet.decode", "http.max_inflight"])));
    until(async || world.router.turns().worker(&home).await.is_none()).await;
    let (status, headers, answer) = world.ask("me", &body, None).await;
    assert_eq!((status, mode(&headers)), (StatusCode::OK, "reseed"), "{answer}");
    // The gate is as narrow as it was told to be.
    let held = world.router.turns().gate().enter().unwrap();
    let (status, _, answer) = world.ask("other", &prompt(10), None).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::TOO_MANY_REQUESTS, &json!("overloaded")));
    drop(held);
    world.assert_clean().await;
}

/// Told to stop: not ready at once, still accepting; a running turn finishes, its lease goes back.
#[actix_web::test]
async fn told_to_stop_it_drains() {
    let flags = [("http.drain_delay_s", "3600"), ("http.drain_s", "600")];
    let p = vec![node("p0", KvRole::Prefill).await];
    let d = vec![node("d0", KvRole::Decode).await];
    let router = Router::start(&settings(&p, &d, &flags)).await.unwrap();
    let serving = router.serve().unwrap();
    let addr = serving.addrs[0];
    let (tell, told) = oneshot::channel();
    let (hurry, hurried) = oneshot::channel::<()>();
    let runs = router.clone();
    let run = actix_web::rt::spawn(async move {
        let told = async { told.await.unwrap() };
        runs.run(serving, told, async { drop(hurried.await) }).await.unwrap()
    });
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    let world = World { url: format!("http://{addr}"), router, nodes: d.into_iter().chain(p).collect() };
    first_turn(&world, "me", 1000).await;
    assert_eq!(world.get("/ready").await.0, StatusCode::OK);
    tell.send(()).unwrap();
    until(async || world.get("/ready").await.0 == StatusCode::SERVICE_UNAVAILABLE).await;
    // Load balancers have not looked yet: it still serves.
    let (_, body) = first_turn(&world, "late", 1000).await;
    world.ask("late", &body, None).await;
    hurry.send(()).unwrap();
    let report = run.await.unwrap();
    assert_eq!(
        (report.running, report.cut, report.unreturned, report.totals.served),
        (0, 0, 0, 3),
        "{report}"
    );
    assert!(tokio::net::TcpStream::connect(addr).await.is_err(), "the listener is closed");
    assert_eq!(world.nodes[0].engine().with(|s, _| s.ledger.leases()), 0);
}

/// What runs when the listener closes is finished, and the report says so.
#[actix_web::test]
async fn a_drain_waits_for_running_turns() {
    let slow = Clock { time_scale: 1.0, ..Clock::default() };
    let config = NodeConfig { cost: slow, model: MODEL.into(), ..NodeConfig::new("d0", [KvRole::Decode]) };
    let d = vec![Node::start(config).await.unwrap()];
    let router = Router::start(&settings(&[], &d, &[("http.drain_delay_s", "0")])).await.unwrap();
    let serving = router.serve().unwrap();
    let url = format!("http://{}", serving.addrs[0]);
    let (tell, told) = oneshot::channel();
    let runs = router.clone();
    let run = actix_web::rt::spawn(async move {
        runs.run(serving, async { told.await.unwrap() }, std::future::pending()).await.unwrap()
    });
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    let world = Arc::new(World { url, router, nodes: d });
    let asking = world.clone();
    let mut body = prompt(100);
    body["max_tokens"] = 640.into(); // four seconds
    let turn = actix_web::rt::spawn(async move { asking.ask("me", &body, None).await });
    until(async || world.router.turns().workers().await.iter().any(|w| w.inflight > 0)).await;
    tell.send(()).unwrap();
    let (status, _, answer) = turn.await.unwrap();
    assert_eq!(status, StatusCode::OK, "{answer}");
    let report = run.await.unwrap();
    assert_eq!((report.running, report.finished, report.cut, report.totals.served), (1, 1, 0, 1), "{report}");
    assert_eq!(world.nodes[0].engine().with(|s, _| s.ledger.leases()), 0);
}

/// The gateway is killed and another one starts: nearly every session finds its worker again.
#[actix_web::test]
async fn a_restarted_gateway_recovers_the_pins() {
    const SESSIONS: usize = 30;
    let mut world = World::start(&[]).await;
    let mut bodies = Vec::new();
    for i in 0..SESSIONS {
        bodies.push(first_turn(&world, &format!("s{i}"), if i % 10 == 0 { 7500 } else { 3000 }).await.1);
    }
    let before = direct_share(&world, &mut bodies).await;
    // Killed: nothing is said to anybody.
    let (d, p) = world.nodes.split_at(2);
    let router = Router::start(&settings(p, d, &[])).await.unwrap();
    world.router.stop().await;
    let serving = router.serve().unwrap();
    world.url = format!("http://{}", serving.addrs[0]);
    actix_web::rt::spawn(serving.server);
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    world.router = router;
    let after = direct_share(&world, &mut bodies).await;
    assert!(before > 0.9 && after >= 0.99 * before, "direct before {before}, after {after}");
    world.assert_clean().await;
}

async fn direct_share(world: &World, bodies: &mut [Value]) -> f64 {
    let mut direct = 0;
    for (i, body) in bodies.iter_mut().enumerate() {
        let (status, headers, answer) = world.ask(&format!("s{i}"), body, None).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        direct += u32::from(mode(&headers) == "direct");
        *body = grown(body.clone(), &answer);
    }
    f64::from(direct) / bodies.len() as f64
}

/// Nodes with a key serve whoever shows it, health included; a gateway with another key is refused and says so.
#[actix_web::test]
async fn workers_ask_for_their_key() {
    let config = NodeConfig {
        key: Some("w-key".into()),
        model: MODEL.into(),
        cost: Clock { time_scale: 1000.0, ..Clock::default() },
        ..NodeConfig::new("d0", [KvRole::Decode])
    };
    let d = vec![Node::start(config).await.unwrap()];
    for path in ["/health", "/ready", "/metrics", "/kvc/info", "/kvc/events", "/v1/models"] {
        let ask = |key: &str| {
            let request = Request::get(format!("{}{path}", d[0].url()));
            send(request.header("authorization", format!("Bearer {key}")), Bytes::new())
        };
        assert_eq!(ask("x-key").await.0, StatusCode::UNAUTHORIZED, "{path}");
        if path != "/kvc/events" {
            assert_eq!(ask("w-key").await.0, StatusCode::OK, "{path}");
        }
    }
    let router = Router::start(&settings(&[], &d, &[("fleet.worker_key", "w-key")])).await.unwrap();
    let serving = router.serve().unwrap();
    let url = format!("http://{}", serving.addrs[0]);
    actix_web::rt::spawn(serving.server);
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    let stranger = Router::start(&settings(&[], &d, &[("fleet.worker_key", "other")])).await.unwrap();
    until(async || stranger.turns().workers().await[0].error.is_some()).await;
    assert!(stranger.turns().workers().await[0].error.as_ref().unwrap().contains("401"));
    let world = World { url, router, nodes: d };
    first_turn(&world, "me", 500).await;
    let (_, workers) = world.get("/admin/workers").await;
    assert!(!workers.to_string().contains("w-key"));
    world.assert_clean().await;
}

/// What routers tell engines about KV is no client's to say.
#[actix_web::test]
async fn no_client_forges_what_routers_say() {
    let world = World::start(&[]).await;
    for (field, value) in [
        ("kv_transfer_params", json!({"remote_host": "10.0.0.1"})),
        ("bootstrap_host", json!("10.0.0.1")),
        ("bootstrap_room", json!(7)),
        ("bootstrap_anything", json!(null)),
        ("disaggregated_params", json!({})),
        ("kvc_continue", json!({"id": "x", "created": 0, "text": "abcd"})),
    ] {
        let mut body = prompt(10);
        body[field] = value;
        let (status, _, answer) = world.ask("me", &body, None).await;
        assert_eq!(
            (status, &answer["error"]["code"]),
            (StatusCode::BAD_REQUEST, &json!("invalid_request")),
            "{field}"
        );
        assert!(
            answer["error"]["param"].as_str().is_some_and(|p| field.starts_with(p.trim_end_matches('*')))
        );
    }
    // Also when its name is spelled in another way, and behind the messages.
    let text = prompt(10).to_string();
    let escaped = format!("{},\"kv\\u005ftransfer_params\":1}}", &text[..text.len() - 1]);
    let request = Request::post(format!("{}/v1/chat/completions", world.url));
    assert_eq!(send(request, escaped.into()).await.0, StatusCode::BAD_REQUEST);
}
