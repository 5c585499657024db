use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::engines::answer::AnswerBody;
use crate::engines::builtin::tests::plan;
use crate::engines::client::Connector;
use crate::engines::fake::{self, Seen};
use crate::engines::{Engine, EngineKind};

const HANDLES: &str = r#"{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_host":"p"}"#;

type Bodies = Arc<Mutex<Vec<(String, Value)>>>;

/// A vLLM that notes its requests and answers all of them so.
async fn engine(bodies: &Bodies, status: u16, answer: &str) -> String {
    let (bodies, answer) = (bodies.clone(), answer.to_owned());
    fake::engine(move |_, seen: &Seen| {
        let id = seen.header("x-request-id").unwrap_or_default().to_owned();
        bodies.lock().unwrap().push((id, serde_json::from_slice(&seen.body).unwrap()));
        Some((status, answer.clone()))
    })
    .await
}

async fn run(prefill: Option<&str>, decode: &str, path: &str, body: &str) -> (Result<Answer, Trouble>, bool) {
    let request = Request::post(path, Bytes::copy_from_slice(body.as_bytes()));
    let engine = Engine::stock(EngineKind::Vllm);
    let (client, mut done) = (Client::new(Connector::plain(Duration::from_secs(5))), false);
    let answer = engine.execute(&client, &plan(prefill, decode), &request, || done = true).await;
    (answer, done)
}

async fn text(answer: Answer) -> (u16, String) {
    let bytes = match answer.body {
        AnswerBody::Whole(bytes) => bytes,
        AnswerBody::Stream(first, mut rest) => {
            [first, rest.read_up_to(1 << 20).await.unwrap()].concat().into()
        }
    };
    (answer.status.as_u16(), String::from_utf8(bytes.to_vec()).unwrap())
}

#[actix_web::test]
async fn p_computes_the_prompt_and_d_gets_its_handles() {
    let (at_p, at_d) = (Bodies::default(), Bodies::default());
    let p = engine(&at_p, 200, &format!(r#"{{"id":"x","kv_transfer_params":{HANDLES}}}"#)).await;
    let d = engine(&at_d, 200, r#"{"choices":[]}"#).await;
    let body = r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"max_tokens":90,"min_tokens":9,
        "kv_transfer_params":{"remote_host":"theirs"},"tools":[{}],"tool_choice":"required","messages":[]}"#;
    let (answer, done) = run(Some(&p), &d, "/v1/chat/completions", body).await;
    assert_eq!(text(answer.unwrap()).await, (200, r#"{"choices":[]}"#.into()));
    assert!(done);
    let (p, d) = (at_p.lock().unwrap()[0].clone(), at_d.lock().unwrap()[0].clone());
    assert_eq!((p.0.as_str(), d.0.as_str()), ("r1", "r1"));
    let asked = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    assert_eq!(
        p.1,
        json!({"model": "m", "stream": false, "max_tokens": 1, "max_completion_tokens": 1, "tools": [{}],
        "tool_choice": "none", "messages": [], "kv_transfer_params": asked})
    );
    let mut sent: Value = serde_json::from_str(body).unwrap();
    sent["kv_transfer_params"] = serde_json::from_str(HANDLES).unwrap();
    assert_eq!(d.1, sent);
}

#[actix_web::test]
async fn each_api_is_asked_for_one_token_in_its_own_words() {
    let one = |path: &str, body: &str| -> Value {
        let request = Request::post(path, Bytes::copy_from_slice(body.as_bytes()));
        serde_json::from_slice(one_token(&request, "{}").body()).unwrap()
    };
    let plain = json!({"stream": false, "kv_transfer_params": {}, "max_tokens": 1, "prompt": "x"});
    assert_eq!(one("/v1/completions?q", r#"{"prompt":"x","echo":true,"best_of":1}"#), plain);
    let responses = json!({"stream": false, "kv_transfer_params": {}, "max_output_tokens": 1, "input": "x"});
    assert_eq!(one("/v1/responses", r#"{"input":"x","max_output_tokens":9,"background":false}"#), responses);
    let messages =
        json!({"stream": false, "kv_transfer_params": {}, "max_tokens": 1, "messages": [], "tools": []});
    let body = r#"{"messages":[],"tools":[],"tool_choice":{"type":"any"},"max_tokens":7}"#;
    assert_eq!(one("/v1/messages", body), messages);
}

#[actix_web::test]
async fn alone_d_gets_the_body_without_foreign_handles() {
    let at_d = Bodies::default();
    let d = engine(&at_d, 200, "{}").await;
    let body = r#"{"kv_\u0074ransfer_params":{"remote_host":"theirs"},"n":1}"#;
    let (answer, _) = run(None, &d, "/v1/chat/completions", body).await;
    assert_eq!(text(answer.unwrap()).await.0, 200);
    // Several answers cannot share handles that are read once.
    let p = fake::nobody().await;
    let (answer, done) = run(Some(&p), &d, "/v1/chat/completions", r#"{"n":2}"#).await;
    assert_eq!(text(answer.unwrap()).await.0, 200);
    assert!(done);
    let bodies: Vec<Value> = at_d.lock().unwrap().iter().map(|(_, body)| body.clone()).collect();
    assert_eq!(bodies, [json!({"n": 1}), json!({"n": 2})]);
}

#[actix_web::test]
async fn whoever_fails_is_done_without() {
    let bodies = Bodies::default();
    let path = "/v1/chat/completions";
    let good = engine(&bodies, 200, &format!(r#"{{"kv_transfer_params":{HANDLES}}}"#)).await;
    let failure = |result: (Result<Answer, Trouble>, bool)| match result.0 {
        Err(Trouble::Replace(failure)) => failure,
        other => panic!("{other:?}"),
    };
    // P is gone, ails, is busy, or was started without a connector.
    for status in [503, 429] {
        let p = engine(&bodies, status, "{}").await;
        assert_eq!(failure(run(Some(&p), &good, path, "{}").await), Failure::PrefillBusy);
    }
    for p in [
        fake::nobody().await,
        engine(&bodies, 500, "{}").await,
        engine(&bodies, 200, r#"{"kv_transfer_params":null}"#).await,
        engine(&bodies, 200, "{}").await,
    ] {
        assert_eq!(failure(run(Some(&p), &good, path, "{}").await), Failure::PrefillUnreachable);
    }
    // D cannot load what P has computed: they do not reach each other.
    let d = engine(&bodies, 500, r#"{"error":{"message":"KV load failed"}}"#).await;
    assert_eq!(failure(run(Some(&good), &d, path, "{}").await), Failure::PrefillUnreachable);
    assert_eq!(
        failure(run(Some(&good), &fake::nobody().await, path, "{}").await),
        Failure::DecodeUnreachable
    );
    // Alone, its own error is an answer; so is P's refusal of the request.
    assert_eq!(text(run(None, &d, path, "{}").await.0.unwrap()).await.0, 500);
    let refuses = engine(&bodies, 400, r#"{"error":"too long"}"#).await;
    let (answer, done) = run(Some(&refuses), &good, path, "{}").await;
    assert_eq!((text(answer.unwrap()).await, done), ((400, r#"{"error":"too long"}"#.into()), false));
}

/// D keeps what it holds of the prompt, P pulls it: the same prompt, one token each.
#[actix_web::test]
async fn kv_goes_back_to_p_by_ds_own_handles() {
    let (at_p, at_d) = (Bodies::default(), Bodies::default());
    let p = engine(&at_p, 200, "{}").await;
    let d = engine(&at_d, 200, &format!(r#"{{"kv_transfer_params":{HANDLES}}}"#)).await;
    let body = Bytes::from_static(br#"{"stream":true,"messages":[1]}"#);
    let request = Request::post("/v1/chat/completions", body);
    let client = Client::new(Connector::plain(Duration::from_secs(5)));
    let (p, d) = (format!("http://{p}"), format!("http://{d}"));
    assert_eq!(hand_back(&client, "r", &request, (&d, &p)).await, Handed::Stored);
    let (asked_d, asked_p) = (at_d.lock().unwrap()[0].clone(), at_p.lock().unwrap()[0].clone());
    assert_eq!((asked_d.0.as_str(), asked_p.0.as_str()), ("r-held", "r-back"));
    assert_eq!(asked_d.1["kv_transfer_params"], serde_json::from_str::<Value>(REMOTE_DECODE).unwrap());
    assert_eq!(asked_p.1["kv_transfer_params"], serde_json::from_str::<Value>(HANDLES).unwrap());
    for asked in [asked_d.1, asked_p.1] {
        let same = (&asked["stream"], &asked["max_tokens"], &asked["messages"]);
        assert_eq!(same, (&json!(false), &json!(1), &json!([1])));
    }
    let silent = format!("http://{}", engine(&at_d, 200, "{}").await);
    assert_eq!(hand_back(&client, "r", &request, (&silent, &p)).await, Handed::NoHandles);
    let ails = format!("http://{}", engine(&at_d, 500, "{}").await);
    assert_eq!(hand_back(&client, "r", &request, (&ails, &p)).await, Handed::Failed);
    assert_eq!(hand_back(&client, "r", &request, (&d, &ails)).await, Handed::Failed);
}

#[actix_web::test]
async fn a_pair_is_introduced_and_it_is_said_who_fails() {
    let bodies = Bodies::default();
    let handles = format!(r#"{{"kv_transfer_params":{HANDLES}}}"#);
    let p = format!("http://{}", engine(&bodies, 200, &handles).await);
    let d = format!("http://{}", engine(&bodies, 200, "{}").await);
    let ails = format!("http://{}", engine(&bodies, 500, "handshake timed out").await);
    let fetch = Fetch::new(&Connector::plain(Duration::from_secs(5)));
    let who = |decode, prefill| Pair { decode, prefill, meets: None };
    assert_eq!(introduce(&fetch, "m", who(&d, &p)).await, Ok(()));
    let why = introduce(&fetch, "m", who(&ails, &p)).await.unwrap_err();
    assert!(why.starts_with(&ails) && why.ends_with("handshake timed out"), "{why}");
    let why = introduce(&fetch, "m", who(&d, &d)).await.unwrap_err();
    assert!(why.ends_with("it has no KV connector"), "{why}");
}

/// With Mooncake's connector both get their parts at once, under the name of one transfer.
#[actix_web::test]
async fn over_mooncake_both_legs_run_at_once() {
    let (at_p, at_d) = (Bodies::default(), Bodies::default());
    let (p, d) = (engine(&at_p, 200, "{}").await, engine(&at_d, 200, r#"{"choices":[]}"#).await);
    let meets = "e_dp0@http://p:8998";
    let run = async |p: &str, d: &str| {
        let mut plan = plan(Some(p), d);
        plan.prefill.as_mut().unwrap().kv_addr = Some(meets.into());
        let body = Bytes::from_static(
            br#"{"stream":true,"messages":[1],"kv_transfer_params":{"transfer_id":"theirs"}}"#,
        );
        let client = Client::new(Connector::plain(Duration::from_secs(5)));
        let (request, mut done) = (Request::post("/v1/chat/completions", body), false);
        let answer = Engine::stock(EngineKind::Vllm).execute(&client, &plan, &request, || done = true).await;
        (answer, done)
    };
    let (answer, done) = run(&p, &d).await;
    assert_eq!((text(answer.unwrap()).await, done), ((200, r#"{"choices":[]}"#.into()), true));
    let (asked_p, asked_d) = (at_p.lock().unwrap()[0].1.clone(), at_d.lock().unwrap()[0].1.clone());
    let (to_p, to_d) = (&asked_p["kv_transfer_params"], &asked_d["kv_transfer_params"]);
    assert!(to_p["transfer_id"].as_str().unwrap().starts_with("xfer-"));
    assert_eq!((&to_p["transfer_id"], &to_p["do_remote_decode"]), (&to_d["transfer_id"], &json!(true)));
    assert_eq!(
        (&to_d["remote_engine_id"], &to_d["remote_bootstrap_addr"]),
        (&json!("e_dp0"), &json!("http://p:8998"))
    );
    assert_eq!(
        (&asked_p["max_tokens"], &asked_p["stream"], &asked_d["stream"]),
        (&json!(1), &json!(false), &json!(true))
    );
    // A D that cannot load, and a P that fails: another P, or none, will do.
    let ails = engine(&at_d, 500, r#"{"error":{"message":"KV load failed"}}"#).await;
    for (p, d) in [(&p, &ails), (&ails, &d)] {
        assert_eq!(run(p, d).await.0.unwrap_err(), Trouble::Replace(Failure::PrefillUnreachable));
    }
    // It has no way back, and a pair is introduced in its own words.
    let mooncake = [("http://p".to_owned(), "http://p:8998".to_owned())].into();
    assert!(!Engine { mooncake, ..Engine::stock(EngineKind::Vllm) }.hands_back());
    let fetch = Fetch::new(&Connector::plain(Duration::from_secs(5)));
    let (p, d) = (format!("http://{p}"), format!("http://{d}"));
    let who = Pair { decode: &d, prefill: &p, meets: Some(meets) };
    assert_eq!(introduce(&fetch, "m", who).await, Ok(()));
    let met = at_d.lock().unwrap().last().unwrap().1["kv_transfer_params"]["remote_engine_id"].clone();
    assert_eq!(met, "e_dp0");
}
