use std::rc::Rc;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::sync::Notify;

use super::*;
use crate::actors::api::Failure;
use crate::engines::builtin::tests::plan;
use crate::engines::client::Connector;
use crate::engines::fake::{self, Conn, Seen};
use crate::engines::{Engine, EngineKind};

const CHAT: &str = "/v1/chat/completions";

async fn run(prefill: Option<&str>, decode: &str, path: &str, body: &str) -> Result<Answer, Trouble> {
    let request = Request::post(path, Bytes::copy_from_slice(body.as_bytes()));
    let engine = Engine::stock(EngineKind::Sglang);
    let client = Client::new(Connector::plain(Duration::from_secs(5)));
    // Far above what any of these may take: a hang fails the test.
    let limit = Duration::from_secs(20);
    tokio::time::timeout(limit, engine.execute(&client, &plan(prefill, decode), &request, || {}))
        .await
        .unwrap()
}

type Seens = Arc<Mutex<Vec<(Vec<u8>, [Option<String>; 3])>>>;

async fn engine(seens: &Seens, status: u16) -> String {
    let seens = seens.clone();
    fake::engine(move |_, seen: &Seen| {
        let headers = HEADERS.map(|name| seen.header(name).map(str::to_owned));
        seens.lock().unwrap().push((seen.body.clone(), headers));
        Some((status, "{}".into()))
    })
    .await
}

#[actix_web::test]
async fn both_legs_meet_in_one_room_and_the_body_stays_as_it_is() {
    let seens = Seens::default();
    let (p, d) = (engine(&seens, 200).await, engine(&seens, 200).await);
    assert_eq!(run(Some(&p), &d, CHAT, r#"{ "n":1 }"#).await.unwrap().status, 200);
    let seens = seens.lock().unwrap();
    assert_eq!(seens.len(), 2);
    assert_eq!(seens[0], seens[1]);
    let (body, [host, port, room]) = &seens[0];
    assert_eq!(
        (body.as_slice(), host.as_deref(), port.as_deref()),
        (&br#"{ "n":1 }"#[..], Some("127.0.0.1"), Some("9"))
    );
    assert!(room.as_ref().unwrap().parse::<i64>().unwrap() >= 0);
}

#[test]
fn where_headers_are_not_read_the_body_names_the_room() {
    let invited = |path: &str, body: &'static str| -> (Value, usize) {
        let request = Request::post(path, Bytes::from_static(body.as_bytes()));
        let (request, headers) = invited(&request, ["p", "8998", "7"]);
        (serde_json::from_slice(request.body()).unwrap(), headers.len())
    };
    let room = json!({"bootstrap_host": "p", "bootstrap_port": 8998, "bootstrap_room": 7, "prompt": [1, 2]});
    assert_eq!(invited("/v1/completions", r#"{"prompt":[1,2]}"#), (room, 0));
    // A client's own room never passes.
    let room = json!({"bootstrap_host": "p", "bootstrap_port": 8998, "bootstrap_room": 7});
    assert_eq!(invited(CHAT, r#"{"bootstrap_room":99}"#), (room, 0));
    let (body, _) = invited("/v1/completions", r#"{"prompt":["a","b"],"n":2}"#);
    assert_eq!(body["bootstrap_port"], json!([8998, 8998, 8998, 8998]));
    assert_eq!(body["bootstrap_room"].as_array().unwrap().len(), 4);
}

#[actix_web::test]
async fn a_dead_p_cancels_d() {
    let closed = Rc::new(Notify::new());
    let tell = closed.clone();
    let d = fake::worker(move |mut conn: Conn| {
        let tell = tell.clone();
        async move {
            conn.request().await;
            conn.closed().await;
            tell.notify_one();
        }
    })
    .await;
    let gone = Trouble::Replace(Failure::PrefillUnreachable);
    assert_eq!(run(Some(&fake::nobody().await), &d, CHAT, "{}").await.unwrap_err(), gone);
    closed.notified().await;
    let seens = Seens::default();
    for status in [500, 503, 429] {
        let p = engine(&seens, status).await;
        let busy = Trouble::Replace(Failure::PrefillBusy);
        let expected = if status == 500 { gone } else { busy };
        assert_eq!(run(Some(&p), &d, CHAT, "{}").await.unwrap_err(), expected);
    }
    // A refusal of the request is P's to give.
    let p = engine(&seens, 400).await;
    assert_eq!(run(Some(&p), &d, CHAT, "{}").await.unwrap().status, 400);
}

/// A D with the plugin computes a request without a room; a client's own room is not one.
#[actix_web::test]
async fn a_d_alone_gets_the_body_without_any_room() {
    let seens = Seens::default();
    let d = engine(&seens, 200).await;
    assert_eq!(run(None, &d, CHAT, r#"{ "n":1 }"#).await.unwrap().status, 200);
    assert_eq!(run(None, &d, CHAT, r#"{"n":1,"bootstrap_room":7}"#).await.unwrap().status, 200);
    let seens = seens.lock().unwrap();
    let (plain, cleaned) = (&seens[0], &seens[1]);
    assert_eq!((plain.0.as_slice(), &plain.1), (&br#"{ "n":1 }"#[..], &[None, None, None]));
    assert_eq!(serde_json::from_slice::<Value>(&cleaned.0).unwrap(), json!({"n": 1}));
}

#[actix_web::test]
async fn a_d_has_its_own_say_on_direct() {
    let says = async |status: u16, body: &'static str| {
        let d = fake::engine(move |_, _| Some((status, body.into()))).await;
        let fetch = Fetch::new(&Connector::plain(Duration::from_secs(5)));
        let asked = AdmitHead {
            request_id: "r".into(),
            session: crate::core::types::SessionId::new("s"),
            turn: 2,
            input_len: 900,
            append_len: 70,
            output_reserve: 16,
            known: 0,
            known_hash: None,
        };
        let ask = async |appends| {
            let engine = Engine { appends, ..Engine::stock(EngineKind::Sglang) };
            engine.admits(&fetch, &format!("http://{d}"), &asked).await
        };
        assert_eq!(ask(false).await, Ok(true), "without the plugin nobody is asked");
        ask(true).await
    };
    assert_eq!(says(200, r#"{"answer":"admitted","mode":"direct","terms":{}}"#).await, Ok(true));
    assert_eq!(says(200, r#"{"answer":"rejected","reason":"no-d-capacity","terms":{}}"#).await, Ok(false));
    let missing = says(404, r#"{"detail":"Not Found"}"#).await.unwrap_err().to_string();
    assert!(missing.ends_with("answered 404 Not Found: is the plugin installed?"), "{missing}");
}
