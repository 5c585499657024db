use std::rc::Rc;

use bytes::Bytes;
use tokio::sync::Notify;

use super::*;
use crate::core::types::{Mode, Rung, SessionId};
use crate::engines::answer::AnswerBody;
use crate::engines::client::Connector;
use crate::engines::fake::{self, Conn};
use crate::wire::admit::Lease;

fn client() -> Client {
    Client::new(Connector::plain(Duration::from_secs(5)))
}

pub(in crate::engines) fn plan(prefill: Option<&str>, decode: &str) -> DispatchPlan {
    DispatchPlan {
        request_id: "r1".into(),
        session: SessionId::new("scope/sé😀"),
        one_shot: false,
        mode: if prefill.is_some() { Mode::Seed } else { Mode::Direct },
        rung: if prefill.is_some() { Rung::Full } else { Rung::Append },
        decode: fake::worker_ref(1, decode),
        prefill: prefill.map(|addr| fake::worker_ref(0, addr)),
        reuse_blocks: 3,
        lease: Some(Lease { request_id: "r1".into(), epoch: 9, tokens: 1, ttl_ms: 1 }),
        restore_blocks: 0,
        sync: Vec::new(),
        slot: None,
        replaced: 0,
    }
}

async fn run(prefill: Option<&str>, decode: &str) -> Result<Answer, Trouble> {
    let request = Request::post("/v1/chat/completions", Bytes::from_static(b"body"));
    // Far above what any of these may take: a hang fails the test.
    tokio::time::timeout(Duration::from_secs(20), execute(&client(), &plan(prefill, decode), &request, || {}))
        .await
        .expect("bounded")
}

async fn answering(status: u16, body: &'static str) -> String {
    fake::worker(move |mut conn: Conn| async move {
        while conn.request().await.is_some() {
            conn.answer(status, body).await;
        }
    })
    .await
}

/// What a silent worker tells.
#[derive(Clone, Default)]
struct Told {
    begun: Rc<Notify>,
    closed: Rc<Notify>,
}

/// A worker that takes a request, answers nothing and says when the connection was closed on it.
async fn silent() -> (String, Told) {
    let told = Told::default();
    let tell = told.clone();
    let addr = fake::worker(move |mut conn: Conn| {
        let tell = tell.clone();
        async move {
            conn.request().await;
            tell.begun.notify_one();
            conn.closed().await;
            tell.closed.notify_one();
        }
    })
    .await;
    (addr, told)
}

async fn text(answer: Answer) -> (u16, String) {
    let status = answer.status.as_u16();
    let bytes = match answer.body {
        AnswerBody::Whole(bytes) => bytes,
        AnswerBody::Stream(first, mut rest) => {
            [first, rest.read_up_to(1 << 20).await.unwrap()].concat().into()
        }
    };
    (status, String::from_utf8(bytes.to_vec()).unwrap())
}

fn replace(result: Result<Answer, Trouble>) -> Failure {
    match result {
        Err(Trouble::Replace(failure)) => failure,
        other => panic!("{other:?}"),
    }
}

const DONE: &str = "{}";
const LONG: &str = r#"{"error":{"message":"too long","code":"context_length_exceeded"}}"#;

#[actix_web::test]
async fn both_legs_get_the_body_and_their_plan() {
    let (tell, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let worker = |name: &'static str| {
        let tell = tell.clone();
        fake::worker(move |mut conn: Conn| {
            let tell = tell.clone();
            async move {
                let request = conn.request().await.unwrap();
                let plan: Plan = serde_json::from_str(request.header(PLAN_HEADER).unwrap()).unwrap();
                let id = request.header("x-request-id").map(str::to_owned);
                tell.send((name, request.body, id, plan)).unwrap();
                conn.answer(200, DONE).await;
            }
        })
    };
    let (p, d) = (worker("p").await, worker("d").await);
    assert_eq!(text(run(Some(&p), &d).await.unwrap()).await, (200, DONE.into()));
    let mut legs = [seen.recv().await.unwrap(), seen.recv().await.unwrap()];
    legs.sort_by_key(|leg| leg.0);
    let turn = plan(Some(&p), &d);
    assert_eq!(legs[0], ("d", b"body".to_vec(), Some("r1".into()), decode_plan(&turn)));
    assert_eq!(legs[1], ("p", b"body".to_vec(), Some("r1".into()), prefill_plan(&turn).unwrap()));
}

#[actix_web::test]
async fn ps_end_is_told_before_d_answers() {
    let p = answering(200, DONE).await;
    let (d, _told) = silent().await;
    let done = Notify::new();
    let (request, turn, client) = (Request::post("/", Bytes::new()), plan(Some(&p), &d), client());
    tokio::select! {
        _ = execute(&client, &turn, &request, || done.notify_one()) => panic!("D is silent"),
        () = done.notified() => {}
    }
}

#[actix_web::test]
async fn a_refusal_of_p_wins_and_d_is_closed_at_once() {
    let p = answering(400, LONG).await;
    let (d, told) = silent().await;
    assert_eq!(text(run(Some(&p), &d).await.unwrap()).await, (400, LONG.into()));
    told.closed.notified().await;
    // Also when D has begun to answer already.
    let eager = answering(200, "garbage").await;
    assert_eq!(text(run(Some(&p), &eager).await.unwrap()).await, (400, LONG.into()));
    // Also when D complains first: about blocks that never came.
    let upset = answering(502, r#"{"error":{"code":"kvc_transfer_failed"}}"#).await;
    assert_eq!(text(run(Some(&p), &upset).await.unwrap()).await.0, 400);
}

#[actix_web::test]
async fn a_dead_p_closes_d_and_is_named() {
    let (d, told) = silent().await;
    assert_eq!(replace(run(Some(&fake::nobody().await), &d).await), Failure::PrefillUnreachable);
    told.closed.notified().await;
    let dying = fake::worker(|mut conn: Conn| async move {
        conn.request().await;
    })
    .await;
    assert_eq!(replace(run(Some(&dying), &d).await), Failure::PrefillUnreachable);
    told.closed.notified().await;
}

#[actix_web::test]
async fn a_dead_d_closes_p_and_is_named() {
    let (p, told) = silent().await;
    assert_eq!(replace(run(Some(&p), &fake::nobody().await).await), Failure::DecodeUnreachable);
    told.closed.notified().await;
    // D dies while P computes; P then complains that it cannot push.
    let dying = fake::worker(|mut conn: Conn| async move {
        conn.request().await;
    })
    .await;
    let pushing = answering(502, r#"{"error":{"code":"kvc_transfer_failed"}}"#).await;
    assert_eq!(replace(run(Some(&pushing), &dying).await), Failure::DecodeUnreachable);
    let failing = answering(500, r#"{"error":{"code":"oops"}}"#).await;
    assert_eq!(replace(run(Some(&failing), &dying).await), Failure::DecodeUnreachable);
    assert_eq!(replace(run(None, &dying).await), Failure::DecodeUnreachable);
    // A head without a byte behind it is no beginning.
    let headless = fake::worker(|mut conn: Conn| async move {
        conn.request().await;
        conn.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
    })
    .await;
    assert_eq!(replace(run(None, &headless).await), Failure::DecodeUnreachable);
}

#[actix_web::test]
async fn a_servers_own_failure_is_answered_as_it_is() {
    let p = answering(500, r#"{"error":{"code":"oops"}}"#).await;
    let (d, told) = silent().await;
    assert_eq!(text(run(Some(&p), &d).await.unwrap()).await.0, 500);
    told.closed.notified().await;
    assert_eq!(text(run(None, &answering(400, LONG).await).await.unwrap()).await, (400, LONG.into()));
    assert_eq!(text(run(None, &answering(500, "x").await).await.unwrap()).await, (500, "x".into()));
}

#[actix_web::test]
async fn answers_about_the_plan_place_the_turn_anew() {
    let cases = [
        (409, r#"{"error":{"message":"m","code":"kvc_plan_mismatch"}}"#, Failure::PlanMismatch),
        (502, r#"{"error":{"message":"m","code":"kvc_transfer_failed"}}"#, Failure::PlanMismatch),
        (429, "", Failure::Busy),
        (503, "", Failure::Busy),
    ];
    let p = answering(200, DONE).await;
    for (status, body, failure) in cases {
        let d = answering(status, body).await;
        assert_eq!(replace(run(None, &d).await), failure, "{status}");
        assert_eq!(replace(run(Some(&p), &d).await), failure, "{status}");
    }
    let other = r#"{"error":{"code":"conflict"}}"#;
    assert_eq!(text(run(None, &answering(409, other).await).await.unwrap()).await.0, 409);
}

#[actix_web::test]
async fn dropping_the_turn_closes_both_legs() {
    let ((p, p_told), (d, d_told)) = (silent().await, silent().await);
    let both = async {
        p_told.begun.notified().await;
        d_told.begun.notified().await;
    };
    tokio::select! {
        _ = run(Some(&p), &d) => panic!("no answer expected"),
        () = both => {}
    }
    p_told.closed.notified().await;
    d_told.closed.notified().await;
}

#[test]
fn plans_travel_as_ascii() {
    let turn = plan(None, "a:1");
    let json = header_json(&decode_plan(&turn));
    assert!(json.is_ascii());
    assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), decode_plan(&turn));
}
