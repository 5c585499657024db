//! A client that goes away takes its turn with it, wherever the turn is.

use bytes::Bytes;
use http_body_util::BodyExt;
use kvc_router::core::types::Mode;
use kvc_router::node::Node;
use kvc_router::node::builtin::state::State;
use kvc_router::wire::plan::{PLAN_HEADER, Plan};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::world::*;

/// Sends a request over a connection of its own and leaves it open, without reading.
async fn ask(node: &Node, plan: &Plan, chat: &Chat) -> TcpStream {
    let body = chat.body(true);
    let plan = serde_json::to_string(plan).unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{PLAN_HEADER}: {plan}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect(node.http_addr()).await.unwrap();
    stream.write_all(&[head.as_bytes(), &body].concat()).await.unwrap();
    stream
}

/// Starts a turn, waits until the books show where it is, hangs up, and expects nothing to stay.
async fn hang_up(node: &Node, plan: &Plan, chat: &Chat, there: impl Fn(&State) -> bool) {
    let before = node.engine().with(|s, _| s.pool.used());
    let client = ask(node, plan, chat).await;
    until(node, there).await;
    drop(client);
    until(node, |s| s.running() + s.waiting.len() == usize::from(before > 0)).await;
    assert_eq!(node.engine().with(|s, _| s.pool.used()), before);
    assert_eq!(node.engine().inbox.waiting(), 0);
}

#[tokio::test]
async fn while_it_decodes_in_silence() {
    let d = stuck("d", 92_104).await;
    let chat = Chat::new(words("silent", 500));
    hang_up(&d, &fallback("t", Some("s")), &chat, |s| s.running() == 1 && s.pool.used() > 20).await;
    at_rest(&d).await;
}

#[tokio::test]
async fn while_it_waits_for_its_transfer_before_the_head() {
    let d = decode().await;
    let chat = Chat::new(words("pull", 500));
    granted(&admit(&d, "t", "s", 0, &chat).await);
    hang_up(&d, &leased(&d, "t", "s", Mode::Seed, 0, true), &chat, |s| s.running() == 1).await;
    at_rest(&d).await;
}

#[tokio::test]
async fn while_it_waits_for_room() {
    let d = stuck("d", 24 * 40).await;
    let first = ask(&d, &fallback("a", Some("a")), &Chat::new(words("a", 700))).await;
    until(&d, |s| s.running() == 1 && s.pool.used() > 25).await;
    let chat = Chat::new(words("b", 700));
    hang_up(&d, &fallback("b", Some("b")), &chat, |s| s.waiting.len() == 1).await;
    drop(first);
    at_rest(&d).await;
    assert_eq!(d.engine().with(|s, _| s.pool.used()), 0);
}

#[tokio::test]
async fn while_its_prompt_is_computed() {
    let mut slow = config("d", kvc_router::wire::info::KvRole::Decode);
    slow.cost.time_scale = 1e-6;
    let d = Node::start(slow).await.unwrap();
    let chat = Chat::new(words("compute", 5000));
    hang_up(&d, &fallback("t", Some("s")), &chat, |s| s.queued_tokens > 4000).await;
    at_rest(&d).await;
}

#[tokio::test]
async fn in_the_middle_of_the_stream() {
    let mut slow = config("d", kvc_router::wire::info::KvRole::Decode);
    slow.cost.time_scale = 1.0;
    let d = Node::start(slow).await.unwrap();
    let chat = Chat::new(words("stream", 300));
    let request = request(&d, &fallback("t", Some("s")), chat.body(true));
    let mut body = client().request(request).await.unwrap().into_body();
    let seen: Bytes = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(seen.starts_with(b"data: "));
    assert_eq!(d.engine().with(|s, _| s.running()), 1);
    drop(body);
    at_rest(&d).await;
    assert_eq!(d.engine().with(|s, _| s.pool.used()), 0);
}

/// The D leg goes away while P computes and sends: P hears of it and stops.
#[tokio::test]
async fn a_cancelled_d_leg_ends_the_p_leg() {
    let mut slow = config("p", kvc_router::wire::info::KvRole::Prefill);
    slow.cost.time_scale = 0.01;
    let (p, d) = (Node::start(slow).await.unwrap(), decode().await);
    let chat = Chat::new(words("legs", 20_000));
    granted(&admit(&d, "t", "s", 0, &chat).await);
    let leg = ask(&d, &leased(&d, "t", "s", Mode::Seed, 0, true), &chat).await;
    let push = prefill_plan(&d, "t", "s", 0);
    let prefill = planned(&p, &push, chat.body(false));
    let cancel = async {
        until(&d, |s| s.running() == 1).await;
        until(&p, |s| s.pool.used() > 0).await;
        drop(leg);
    };
    let (answer, ()) = tokio::join!(prefill, cancel);
    assert_eq!((answer.status.as_u16(), &*answer.code()), (502, "kvc_transfer_failed"));
    assert!(answer.body.contains("cancelled"), "{}", answer.body);
    at_rest(&d).await;
    at_rest(&p).await;
    assert_eq!(d.engine().with(|s, _| s.pool.used()), 0);
}

/// The P leg goes away: D's turn ends with a clear answer.
#[tokio::test]
async fn a_cancelled_p_leg_ends_the_d_leg() {
    let mut slow = config("p", kvc_router::wire::info::KvRole::Prefill);
    slow.cost.time_scale = 0.01;
    let (p, d) = (Node::start(slow).await.unwrap(), decode().await);
    let chat = Chat::new(words("legs", 20_000));
    granted(&admit(&d, "t", "s", 0, &chat).await);
    let leg = ask(&p, &prefill_plan(&d, "t", "s", 0), &chat).await;
    let plan = leased(&d, "t", "s", Mode::Seed, 0, true);
    let cancel = async {
        until(&d, |s| s.running() == 1).await;
        // Two chunks are computed, so the first is on its way.
        until(&p, |s| s.pool.used() > 30).await;
        drop(leg);
    };
    let (answer, ()) = tokio::join!(planned(&d, &plan, chat.body(true)), cancel);
    assert_eq!((answer.status.as_u16(), &*answer.code()), (502, "kvc_transfer_failed"));
    at_rest(&d).await;
    at_rest(&p).await;
}

#[tokio::test]
async fn a_stopped_node_cuts_its_streams() {
    let d = stuck("d", 92_104).await;
    let request = request(&d, &fallback("t", Some("s")), Chat::new("x").body(true));
    let client = client();
    let response = client.request(request).await.unwrap();
    let engine = d.engine().clone();
    d.stop().await;
    assert!(response.into_body().collect().await.is_err());
    assert_eq!(engine.with(|s, _| s.running()), 0);
}
