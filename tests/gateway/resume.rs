//! `http.resume_streams`: a worker dies in the middle of its answer, and its client cannot tell.

use hyper_util::client::legacy::Client;

use super::*;

/// A fleet of one worker, so slow that it is still at its first tokens when it dies.
async fn slow(more: &[(&str, &str)]) -> World {
    let cost = Clock { time_scale: 0.02, ..Clock::default() };
    let config = NodeConfig { cost, model: MODEL.into(), ..NodeConfig::new("slow", [KvRole::Decode]) };
    let nodes = vec![Node::start(config).await.unwrap()];
    let router = Router::start(&settings(&[], &nodes, more)).await.unwrap();
    let serving = router.serve().unwrap();
    let url = format!("http://{}", serving.addrs[0]);
    actix_web::rt::spawn(serving.server);
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    World { url, router, nodes }
}

/// Another worker joins, and the first one dies.
async fn is_relieved(world: &mut World) {
    let fast = node("fast", KvRole::Decode).await;
    let body = json!({"url": fast.url(), "role": "decode", "name": "fast"});
    let (status, _, _) =
        send(Request::post(format!("{}/admin/workers", world.url)), body.to_string().into()).await;
    assert_eq!(status, StatusCode::CREATED);
    assert!(world.router.turns().all_up(Duration::from_secs(20)).await);
    world.nodes.push(fast);
    world.nodes.remove(0).stop().await;
}

/// The stream of `body`; once some of its text has come, `then` happens.
async fn stream(
    world: &mut World,
    path: &str,
    body: &Value,
    then: impl AsyncFnOnce(&mut World),
) -> (String, bool) {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let request = Request::post(format!("{}{path}", world.url)).header("x-session-id", "me");
    let request = request.body(Full::new(Bytes::from(body.to_string()))).unwrap();
    let response = client.request(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let (mut body, mut text, mut then) = (response.into_body(), String::new(), Some(then));
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return (text, false) };
        text += std::str::from_utf8(frame.data_ref().unwrap()).unwrap();
        if text.matches("data:").count() > 6
            && let Some(then) = then.take()
        {
            then(world).await;
        }
    }
    assert!(then.is_none(), "the answer was over before its worker died: {text}");
    (text, true)
}

/// All a client can compare: every event, without its names and with the sums of its usage.
fn events(text: &str) -> Vec<Value> {
    fn plain(value: &mut Value) {
        match value {
            Value::Array(items) => items.iter_mut().for_each(plain),
            Value::Object(fields) => {
                for name in ["id", "item_id", "created", "created_at"] {
                    fields.remove(name);
                }
                if let Some(usage) = fields.get_mut("usage").filter(|usage| usage.is_object()) {
                    let number = |name: &str| usage[name].as_u64().unwrap_or(0);
                    let cached = number("cache_read_input_tokens");
                    let prompt = number("prompt_tokens") + number("input_tokens") + cached;
                    *usage = json!([prompt, number("completion_tokens") + number("output_tokens")]);
                }
                fields.values_mut().for_each(plain);
            }
            _ => {}
        }
    }
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let parsed = data.map(|data| serde_json::from_str(data).unwrap_or_else(|_| json!(data)));
    parsed.map(|mut event| (plain(&mut event), event).1).collect()
}

fn requests() -> [(&'static str, Value); 4] {
    let text = "tell me a long story, ".repeat(12);
    let said = json!([{"role": "user", "content": text}]);
    let body = |more: Value| {
        let mut body = json!({"model": MODEL, "stream": true, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let usage = json!({"include_usage": true});
    [
        (
            "/v1/chat/completions",
            body(json!({"messages": said, "max_tokens": 30, "stream_options": usage,
                "tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "required"})),
        ),
        ("/v1/completions", body(json!({"prompt": text, "max_tokens": 30, "stream_options": usage}))),
        ("/v1/responses", body(json!({"input": said, "max_output_tokens": 30}))),
        ("/v1/messages", body(json!({"messages": said, "max_tokens": 30}))),
    ]
}

/// In every API: each event is the one an undisturbed worker sends, usage and numbers included, under one name.
#[actix_web::test]
async fn a_death_in_mid_stream_is_not_noticed() {
    for (path, body) in requests() {
        let mut world = slow(&[("http.resume_streams", "true")]).await;
        let (resumed, whole) = stream(&mut world, path, &body, is_relieved).await;
        assert!(whole, "{path}: {resumed}");
        let (undisturbed, whole) = stream(&mut world, path, &body, async |_| {}).await;
        assert!(whole);
        assert_eq!(events(&resumed), events(&undisturbed), "{path}");
        let names = |text: &str| {
            let ids = text.match_indices("\"id\":\"chatcmpl-").map(|(at, _)| text[at..].split(',').next());
            ids.map(Option::unwrap).map(str::to_owned).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert!(names(&resumed) <= 1, "{resumed}");
        let (_, _, metrics) = send(Request::get(format!("{}/metrics", world.url)), Bytes::new()).await;
        let metrics = String::from_utf8_lossy(&metrics);
        let resumed = metrics.lines().find_map(|line| line.strip_prefix("kvc_resumed_total "));
        assert!(resumed.is_some_and(|count| count != "0"), "{resumed:?}");
        world.assert_clean().await;
    }
}

/// Where two workers might say different things, or when it was not asked for, the client is told.
#[actix_web::test]
async fn an_answer_by_chance_ends_with_its_worker() {
    let [(path, greedy), ..] = requests();
    let mut warm = greedy.clone();
    warm["temperature"] = 1.into();
    for (setting, body) in [("true", warm), ("false", greedy)] {
        let mut world = slow(&[("http.resume_streams", setting)]).await;
        let (text, whole) = stream(&mut world, path, &body, is_relieved).await;
        assert!(!whole && text.contains("worker_died") && !text.contains("[DONE]"), "{text}");
        world.assert_clean().await;
    }
}
