//! Plans that don't hold, and transfers that fail: a clear answer, and nothing stays.

use bytes::Bytes;
use kvc_router::core::types::{BlockHash, Mode};
use kvc_router::node::Model;
use kvc_router::node::transfer::frame::{self, Kind};
use kvc_router::node::transfer::message::{Begin, Hello, Refuse, Welcome, blocks, from_json, json};
use kvc_router::node::{Node, NodeConfig};
use kvc_router::prompt::{Api, assistant_header, canonical, chain};
use kvc_router::wire::info::KvRole;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::world::*;

#[tokio::test]
async fn a_plan_that_does_not_hold_is_409() {
    let d = decode().await;
    let chat = Chat::new(words("plan", 300));
    let body = chat.body(false);
    let mut seen = Vec::new();
    for (name, plan) in [
        ("no such lease", leased(&d, "none", "s", Mode::Direct, 0, false)),
        ("more blocks than held", {
            granted(&admit(&d, "a", "s", 0, &chat).await);
            leased(&d, "a", "s", Mode::Direct, 5, false)
        }),
        ("no lease for a mode that needs one", {
            let mut plan = fallback("b", None);
            if let kvc_router::wire::plan::Plan::Decode { mode, .. } = &mut plan {
                *mode = Mode::Seed;
            }
            plan
        }),
        ("an old epoch", {
            let mut plan = leased(&d, "c", "s", Mode::Direct, 0, false);
            if let kvc_router::wire::plan::Plan::Decode { lease_epoch, .. } = &mut plan {
                *lease_epoch = Some(d.info().epoch ^ 1);
            }
            plan
        }),
    ] {
        let answer = planned(&d, &plan, body.clone()).await;
        assert_eq!((answer.status.as_u16(), &*answer.code()), (409, "kvc_plan_mismatch"), "{name}");
        seen.push(name);
    }
    at_rest(&d).await;
}

#[tokio::test]
async fn a_lease_for_another_prompt_is_409() {
    let d = decode().await;
    let mut chat = Chat::new(words("mine", 300));
    let (_, answer) = turn(&d, None, "t0", "s", 0, &chat).await;
    let text = answer.text();
    chat.say("assistant", text).say("user", "go on");
    let (mode, reuse) = granted(&admit(&d, "t1", "s", 1, &chat).await);
    let other = Chat::new(words("other", 400));
    let plan = leased(&d, "t1", "s", mode, reuse, false);
    let answer = planned(&d, &plan, other.body(false)).await;
    assert_eq!((answer.status.as_u16(), &*answer.code()), (409, "kvc_plan_mismatch"));
    at_rest(&d).await;
}

/// What a P would send for a chat.
struct Sender {
    hello: Hello,
    chain: Vec<BlockHash>,
    kv: Vec<Vec<u8>>,
}

impl Sender {
    fn new(chat: &Chat) -> Self {
        let mut text = canonical(Api::Chat, &chat.body(false)).unwrap();
        text.extend_from_slice(assistant_header(Api::Chat));
        let kv = Model::default().blocks(None, &text).iter().map(|kv| kv.to_vec()).collect();
        let hello = Hello {
            protocol: kvc_router::wire::PROTOCOL,
            model: MODEL.into(),
            block_tokens: 24,
            kv_bytes_per_token: 64,
            from: "fake".into(),
            epoch: 1,
        };
        Self { hello, chain: chain(MODEL, &text), kv }
    }

    fn begin(&self, d: &Node, id: &str) -> Vec<u8> {
        let blocks = self.chain.len() as u32;
        let (transfer_id, epoch) = (id.to_owned(), d.info().epoch);
        json(Kind::Begin, &Begin { transfer_id, epoch, from_block: 0, blocks, held_blocks: 0 })
    }

    fn blocks(&self, from: usize, to: usize) -> Vec<u8> {
        blocks(from, (from..to).map(|i| (self.chain[i], &self.kv[i][..])).collect::<Vec<_>>().into_iter())
    }

    async fn connect(&self, d: &Node) -> TcpStream {
        let mut stream = TcpStream::connect(d.kv_addr().unwrap()).await.unwrap();
        stream.write_all(&json(Kind::Hello, &self.hello)).await.unwrap();
        assert_eq!(frame::read(&mut stream).await.unwrap().kind, Kind::Welcome);
        stream
    }
}

async fn refusal(stream: &mut TcpStream) -> String {
    let answer = frame::read(stream).await.unwrap();
    assert_eq!(answer.kind, Kind::Refuse);
    from_json::<Refuse>("refusal", &answer.payload).unwrap().reason
}

/// Runs a leased D leg against frames sent by hand; returns D's answer and its last word to the sender.
async fn fed(
    d: &Node,
    chat: &Chat,
    frames: impl AsyncFnOnce(&Sender, &mut TcpStream),
) -> (Answer, Option<String>) {
    granted(&admit(d, "t", "s", 0, chat).await);
    let plan = leased(d, "t", "s", Mode::Seed, 0, true);
    let sender = Sender::new(chat);
    let feed = async {
        let mut stream = sender.connect(d).await;
        stream.write_all(&sender.begin(d, "t")).await.unwrap();
        frames(&sender, &mut stream).await;
        match frame::read(&mut stream).await.unwrap() {
            frame if frame.kind == Kind::Ack => None,
            frame => Some(from_json::<Refuse>("refusal", &frame.payload).unwrap().reason),
        }
    };
    let (answer, last) = tokio::join!(planned(d, &plan, chat.body(false)), feed);
    at_rest(d).await;
    (answer, last)
}

#[tokio::test]
async fn good_frames_by_hand_are_taken() {
    let (d, chat) = (decode().await, Chat::new(words("hand", 300)));
    let (answer, last) = fed(&d, &chat, async |s, to| {
        to.write_all(&s.blocks(0, 5)).await.unwrap();
        to.write_all(&s.blocks(5, s.chain.len())).await.unwrap();
        to.write_all(&frame::frame(Kind::End, b"")).await.unwrap();
    })
    .await;
    assert_eq!((answer.text(), last), (chat.reference(), None));
}

#[tokio::test]
async fn bad_frames_fail_the_transfer_on_both_sides() {
    type Feed = fn(&Sender) -> Vec<u8>;
    let cases: [(&str, Feed, &str); 7] = [
        ("a flipped bit", |s| flip(s.blocks(0, 5)), "checksum"),
        (
            "too long",
            |s| {
                let mut frame = s.blocks(0, 1);
                frame[8..12].copy_from_slice(&(8u32 << 20).to_le_bytes());
                frame
            },
            "at most",
        ),
        ("not a frame", |_| vec![b'x'; 64], "not a KV frame"),
        ("a hole", |s| s.blocks(1, 5), "out of order"),
        (
            "another prompt's block",
            |s| blocks(0, [(BlockHash(1), &s.kv[0][..])].into_iter()),
            "another prompt",
        ),
        (
            "half a block",
            |s| frame::frame(Kind::Blocks, &s.blocks(0, 1)[frame::HEADER..][..100]),
            "whole blocks",
        ),
        ("an early end", |_| frame::frame(Kind::End, b""), "before its last block"),
    ];
    for (name, bytes, reason) in cases {
        let (d, chat) = (decode().await, Chat::new(words("bad", 300)));
        let (answer, last) = fed(&d, &chat, async |s, to| to.write_all(&bytes(s)).await.unwrap()).await;
        assert_eq!((answer.status.as_u16(), &*answer.code()), (502, "kvc_transfer_failed"), "{name}");
        assert!(answer.body.contains(reason), "{name}: {}", answer.body);
        assert!(last.is_some_and(|last| last.contains(reason)), "{name}");
        assert_eq!(d.engine().with(|s, _| s.pool.used()), 0, "{name}");
    }
}

fn flip(mut frame: Vec<u8>) -> Vec<u8> {
    let at = frame.len() / 2;
    frame[at] ^= 1;
    frame
}

#[tokio::test]
async fn a_p_that_dies_within_the_transfer_is_502_at_d() {
    let (d, chat) = (decode().await, Chat::new(words("dies", 600)));
    granted(&admit(&d, "t", "s", 0, &chat).await);
    let sender = Sender::new(&chat);
    let feed = async {
        let mut stream = sender.connect(&d).await;
        stream.write_all(&sender.begin(&d, "t")).await.unwrap();
        stream.write_all(&sender.blocks(0, 3)).await.unwrap();
        stream.write_all(&sender.blocks(3, 6)[..500]).await.unwrap();
    };
    let plan = leased(&d, "t", "s", Mode::Seed, 0, true);
    let (answer, ()) = tokio::join!(planned(&d, &plan, chat.body(false)), feed);
    assert_eq!((answer.status.as_u16(), &*answer.code()), (502, "kvc_transfer_failed"));
    at_rest(&d).await;
    assert_eq!(d.engine().with(|s, _| s.pool.used()), 0);
    // The session is served by the next attempt.
    let (_, answer) = turn(&d, None, "again", "s", 0, &chat).await;
    assert_eq!(answer.text(), chat.reference());
}

#[tokio::test]
async fn a_d_that_dies_within_the_transfer_is_502_at_p_and_p_keeps_what_it_computed() {
    let p = prefill().await;
    let chat = Chat::new(words("gone", 3000));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    let dying = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        frame::read(&mut stream).await.unwrap();
        stream.write_all(&json(Kind::Welcome, &Welcome { epoch: 9 })).await.unwrap();
        frame::read(&mut stream).await.unwrap();
        frame::read(&mut stream).await.unwrap();
    };
    let d = decode().await;
    let mut plan = prefill_plan(&d, "t", "s", 0);
    if let kvc_router::wire::plan::Plan::Prefill { push, .. } = &mut plan {
        push.to = to.to_string();
    }
    let (answer, ()) = tokio::join!(planned(&p, &plan, chat.body(false)), dying);
    assert_eq!((answer.status.as_u16(), &*answer.code()), (502, "kvc_transfer_failed"));
    at_rest(&p).await;
    assert!(p.engine().with(|s, _| s.pool.used()) > 0);
    let (_, answer) = turn(&d, Some(&p), "t1", "s", 0, &chat).await;
    assert_eq!(answer.text(), chat.reference());
}

#[tokio::test]
async fn another_layout_is_refused_by_the_handshake() {
    let mut other = config("p", KvRole::Prefill);
    other.kv.kv_bytes_per_token = 128;
    let (p, d) = (Node::start(other).await.unwrap(), decode().await);
    let chat = Chat::new(words("layout", 100));
    let answer = planned(&p, &prefill_plan(&d, "t", "s", 0), chat.body(false)).await;
    assert_eq!(answer.status, 502);
    assert!(answer.body.contains("kv_bytes_per_token differs"), "{}", answer.body);
    at_rest(&p).await;
}

#[tokio::test]
async fn a_transfer_nobody_waits_for_expires() {
    let mut impatient = config("d", KvRole::Decode);
    impatient.limits.transfer_patience = std::time::Duration::from_millis(20);
    let d = Node::start(impatient).await.unwrap();
    let sender = Sender::new(&Chat::new("nobody"));
    let mut stream = sender.connect(&d).await;
    stream.write_all(&sender.begin(&d, "unknown")).await.unwrap();
    assert!(refusal(&mut stream).await.contains("no turn announced"));
    let mut stream = sender.connect(&d).await;
    let begin = Begin { transfer_id: "x".into(), epoch: 0, from_block: 0, blocks: 0, held_blocks: 0 };
    stream.write_all(&json(Kind::Begin, &begin)).await.unwrap();
    assert!(refusal(&mut stream).await.contains("earlier start"));
    assert_eq!(d.engine().inbox.waiting(), 0);
}

#[tokio::test]
async fn a_node_without_the_role_says_so() {
    let (p, d) = (prefill().await, decode().await);
    let body = Chat::new("x").body(false);
    assert_eq!(plain(&p, body.clone()).await.code(), "kvc_role");
    assert_eq!(planned(&d, &prefill_plan(&d, "t", "s", 0), body).await.code(), "kvc_role");
    assert_eq!(
        post(&p, "/admit_direct_append", "application/json", Bytes::from("{}")).await.code(),
        "kvc_role"
    );
    let bad = NodeConfig::new("n", []);
    assert!(Node::start(bad).await.unwrap_err().to_string().contains("roles"));
}
