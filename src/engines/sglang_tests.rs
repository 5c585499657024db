use std::rc::Rc;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::sync::Notify;

use super::*;
use crate::engines::builtin::tests::plan;
use crate::engines::client::Connector;
use crate::engines::fake::{self, Conn, Seen};
use crate::engines::{Engine, EngineKind};

const CHAT: &str = "/v1/chat/completions";

async fn run(prefill: Option<&str>, decode: &str, path: &str, body: &str) -> Result<Answer, Trouble> {
    let request = Request::post(path, Bytes::copy_from_slice(body.as_bytes()));
    let engine = Engine { kind: EngineKind::Sglang, nodes: false };
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
    // Nothing is served by a D alone.
    assert!(matches!(run(None, &d, CHAT, "{}").await, Err(Trouble::Broken(_))));
}
