//! D→P when things go wrong: never a wrong text, never a leaked block or lease, never a stalled turn.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use kvc_router::core::options::D2pTrigger;
use kvc_router::core::types::{BlockHash, SessionId};
use kvc_router::node::Node;
use kvc_router::node::transfer::frame::{self, Kind};
use kvc_router::node::transfer::message::{
    Hello, OfferHead, Refuse, Welcome, blocks, from_json, json, offer, read_want,
};
use kvc_router::wire::plan::{Plan, Push};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::d2p::{keeping, kept, local, pushed, pushing, restore, start, synced};
use super::world::*;

const KV: [u8; 1536] = [7; 1536];

fn hello(bytes: u32) -> Hello {
    Hello {
        protocol: kvc_router::wire::PROTOCOL,
        model: MODEL.into(),
        block_tokens: 24,
        kv_bytes_per_token: bytes,
        from: "fake".into(),
        epoch: 1,
    }
}

async fn connect(p: &Node) -> TcpStream {
    let mut stream = TcpStream::connect(p.d2p_addr().unwrap()).await.unwrap();
    stream.write_all(&json(Kind::Hello, &hello(64))).await.unwrap();
    assert_eq!(frame::read(&mut stream).await.unwrap().kind, Kind::Welcome);
    stream
}

fn offered(p: &Node, n: u64) -> Vec<u8> {
    let head = OfferHead { sync_id: 1, session: SessionId::new("s"), epoch: p.info().epoch };
    offer(&head, (0..n).map(BlockHash).collect::<Vec<_>>().into_iter())
}

fn batch(from: u64, n: u64) -> Vec<u8> {
    blocks(from as usize, (from..from + n).map(|b| (BlockHash(b), &KV[..])).collect::<Vec<_>>().into_iter())
}

async fn refusal(stream: &mut TcpStream) -> String {
    let answer = frame::read(stream).await.unwrap();
    assert_eq!(answer.kind, Kind::Refuse);
    from_json::<Refuse>("refusal", &answer.payload).unwrap().reason
}

#[tokio::test]
async fn the_handshake_refuses_another_layout_and_another_listener() {
    let p = start(keeping(100)).await;
    let mut stream = TcpStream::connect(p.d2p_addr().unwrap()).await.unwrap();
    stream.write_all(&json(Kind::Hello, &hello(128))).await.unwrap();
    assert!(refusal(&mut stream).await.contains("kv_bytes_per_token differs"));
    let mut stream = connect(&p).await;
    stream.write_all(&frame::frame(Kind::Begin, b"{}")).await.unwrap();
    assert!(refusal(&mut stream).await.contains("expected an offer"));
    let mut stream = connect(&p).await;
    let head = OfferHead { sync_id: 1, session: SessionId::new("s"), epoch: 1 ^ p.info().epoch };
    stream
        .write_all(&offer(&head, std::iter::empty::<BlockHash>().collect::<Vec<_>>().into_iter()))
        .await
        .unwrap();
    assert!(refusal(&mut stream).await.contains("earlier start"));
}

#[tokio::test]
async fn a_push_by_hand_is_taken_and_repeated_for_nothing() {
    let p = start(keeping(100)).await;
    let mut stream = connect(&p).await;
    for wanted in [true, false] {
        stream.write_all(&offered(&p, 5)).await.unwrap();
        let want = frame::read(&mut stream).await.unwrap();
        assert_eq!(read_want(&want.payload, 5).unwrap(), [wanted; 5]);
        if wanted {
            stream.write_all(&batch(0, 2)).await.unwrap();
            stream.write_all(&batch(2, 3)).await.unwrap();
        }
        stream.write_all(&frame::frame(Kind::End, b"")).await.unwrap();
        let ack = frame::read(&mut stream).await.unwrap();
        assert_eq!(ack.kind, Kind::Ack);
        let result: kvc_router::node::d2p::tier::InsertExternalResult =
            from_json("ack", &ack.payload).unwrap();
        assert_eq!((result.inserted, result.shared), if wanted { (5, 0) } else { (0, 5) });
    }
    at_rest(&p).await;
}

#[tokio::test]
async fn bad_pushes_end_the_connection_and_leave_whole_blocks_only() {
    type Feed = fn() -> Vec<u8>;
    let cases: [(&str, Feed, &str); 6] = [
        ("a flipped bit", || flip(batch(0, 3)), "checksum"),
        ("a hole", || batch(1, 3), "not asked for"),
        ("too many", || batch(0, 9), "not asked for"),
        ("half a block", || frame::frame(Kind::Blocks, &batch(0, 1)[frame::HEADER..][..99]), "whole blocks"),
        ("an early end", || frame::frame(Kind::End, b""), "before its last block"),
        ("not a frame", || vec![b'x'; 64], "not a KV frame"),
    ];
    for (name, bytes, reason) in cases {
        let p = start(keeping(100)).await;
        let mut stream = connect(&p).await;
        stream.write_all(&offered(&p, 5)).await.unwrap();
        assert_eq!(frame::read(&mut stream).await.unwrap().kind, Kind::Want);
        stream.write_all(&bytes()).await.unwrap();
        let last = refusal(&mut stream).await;
        assert!(last.contains(reason), "{name}: {last}");
        assert_eq!(p.engine().with(|s, _| s.backups.tier.len()), 0, "{name}");
        at_rest(&p).await;
    }
}

fn flip(mut frame: Vec<u8>) -> Vec<u8> {
    let at = frame.len() / 2;
    frame[at] ^= 1;
    frame
}

/// A D that dies in mid-push: what arrived whole stays, its place in the buffer comes back.
#[tokio::test]
async fn a_d_that_dies_within_a_push_leaves_what_arrived_whole() {
    let mut config = keeping(100);
    config.limits.sync_buffers = 1;
    let p = start(config).await;
    let mut stream = connect(&p).await;
    stream.write_all(&offered(&p, 9)).await.unwrap();
    frame::read(&mut stream).await.unwrap();
    stream.write_all(&batch(0, 3)).await.unwrap();
    stream.write_all(&batch(3, 3)[..700]).await.unwrap();
    drop(stream);
    let d = start(pushing("d", 500, D2pTrigger::Commit)).await;
    let chat = Chat::new(words("next", 300));
    let _ = local(&d, &p, "t", "s", &chat).await.text();
    pushed(&d).await;
    assert!(kept(&p, &chat, 0) >= 12);
    assert_eq!(p.engine().with(|s, _| (0..9).filter(|b| s.backups.tier.contains(BlockHash(*b))).count()), 3);
    at_rest(&p).await;
}

/// A receiver that is full says so after a while; the sender's turns never notice.
#[tokio::test]
async fn a_full_receiver_refuses_and_no_turn_waits_for_it() {
    let mut config = keeping(100);
    config.limits.sync_buffers = 1;
    config.limits.transfer_idle = Duration::from_millis(300);
    let p = start(config).await;
    let mut slow = connect(&p).await;
    slow.write_all(&offered(&p, 9)).await.unwrap();
    frame::read(&mut slow).await.unwrap();
    let mut second = connect(&p).await;
    second.write_all(&offered(&p, 9)).await.unwrap();
    let answers = tokio::join!(refusal(&mut slow), frame::read(&mut second));
    assert!(answers.0.contains("no KV frame"), "{}", answers.0);
    // Whichever was first: refused for lack of a buffer, or served by the one that came back.
    assert!(matches!(answers.1.unwrap().kind, Kind::Refuse | Kind::Want));
    at_rest(&p).await;
}

/// A P that takes nothing: pushes fail, turns go on at their own speed, and the queue is bounded.
#[tokio::test]
async fn a_deaf_p_costs_backups_and_nothing_else() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let p = start(keeping(100)).await;
    let mut config = pushing("d", 500, D2pTrigger::Commit);
    config.limits.sync_patience = Duration::from_millis(100);
    config.limits.sync_queue_bytes = 100 << 10;
    let d = start(config).await;
    let mut chat = Chat::new(words("mine", 600));
    for i in 0..4 {
        let id = format!("t{i}");
        let (mode, reuse) = granted(&admit(&d, &id, "s", 1, &chat).await);
        let mut plan = synced(leased(&d, &id, "s", mode, reuse, false), &p, 0);
        if let Plan::Decode { sync, .. } = &mut plan {
            sync[0].to = listener.local_addr().unwrap().to_string();
        }
        let text = planned(&d, &plan, chat.body(true)).await.text();
        assert_eq!(text, chat.reference());
        chat.say("assistant", text).say("user", "go on");
    }
    pushed(&d).await;
    let counters = &d.engine().sync.counters;
    assert_eq!(counters.stored.load(Relaxed), 0, "{counters:?}");
    assert!(counters.failed.load(Relaxed) > 0);
    at_rest(&d).await;
}

/// β = 0 with a dead P: the turn ends all the same, and it is counted.
#[tokio::test]
async fn beta_0_does_not_wait_for_a_dead_p() {
    let p = start(keeping(100)).await;
    let mut config = pushing("d", 500, D2pTrigger::Commit);
    config.options.d2p_staleness_budget_tokens = Some(0);
    let d = start(config).await;
    let (_, reuse) = granted(&admit(&d, "t", "s", 0, &Chat::new("hello there")).await);
    let chat = Chat::new("hello there");
    let plan = synced(leased(&d, "t", "s", kvc_router::core::types::Mode::Seed, reuse, false), &p, 0);
    p.stop().await;
    assert_eq!(planned(&d, &plan, chat.body(true)).await.text(), chat.reference());
    assert_eq!(d.engine().sync.counters.late.load(Relaxed), 1);
    at_rest(&d).await;
}

/// P drops the backup between probe and use: 409 at P, 502 at D, and the next rung serves the turn.
#[tokio::test]
async fn a_backup_that_is_gone_is_409_and_the_turn_is_served_otherwise() {
    let (p, d) = (start(keeping(1000)).await, start(pushing("d", 500, D2pTrigger::Commit)).await);
    let mut chat = Chat::new(words("mine", 600));
    let text = local(&d, &p, "t0", "s", &chat).await.text();
    pushed(&d).await;
    let backed = kept(&p, &chat, 0) as u32;
    chat.say("assistant", text).say("user", "go on");
    p.drop_backups();
    let mut quick = pushing("e", 500, D2pTrigger::Commit);
    quick.limits.restore_wait = Duration::from_millis(200);
    let e = start(quick).await;
    let (answer, sent) = restore(&e, &p, "t1", "s", &chat, backed).await;
    assert_eq!((sent.status.as_u16(), &*sent.code()), (409, "kvc_plan_mismatch"));
    assert_eq!((answer.status.as_u16(), &*answer.code()), (502, "kvc_transfer_failed"));
    at_rest(&e).await;
    let (_, answer) = turn(&e, None, "t2", "s", 1, &chat).await;
    assert_eq!(answer.text(), chat.reference());
    for node in [&p, &d, &e] {
        at_rest(node).await;
    }
}

/// P dies while it restores: D says 502 within its deadline and holds nothing of it.
#[tokio::test]
async fn a_p_that_dies_within_a_restore_is_502_at_d() {
    let d = start(pushing("d", 500, D2pTrigger::Commit)).await;
    let chat = Chat::new(words("mine", 600));
    granted(&admit(&d, "t", "s", 1, &chat).await);
    let plan = Plan::Decode {
        request_id: "t".into(),
        session: Some(SessionId::new("s")),
        mode: kvc_router::core::types::Mode::Seed,
        lease_epoch: Some(d.info().epoch),
        reuse_blocks: 0,
        pull: Some(kvc_router::wire::plan::Pull { transfer_id: "t".into(), from_block: 0, blocks: Some(9) }),
        sync: Vec::new(),
    };
    let dying = async {
        let mut stream = TcpStream::connect(d.kv_addr().unwrap()).await.unwrap();
        stream.write_all(&json(Kind::Hello, &hello(64))).await.unwrap();
        let welcome = frame::read(&mut stream).await.unwrap();
        let epoch = from_json::<Welcome>("welcome", &welcome.payload).unwrap().epoch;
        let begin = kvc_router::node::transfer::message::Begin {
            transfer_id: "t".into(),
            epoch,
            from_block: 0,
            blocks: 9,
            held_blocks: 9,
        };
        stream.write_all(&json(Kind::Begin, &begin)).await.unwrap();
        let kv = vec![(chat.chain()[0], &KV[..])];
        stream.write_all(&blocks(0, kv.into_iter())).await.unwrap();
    };
    let (answer, ()) = tokio::join!(planned(&d, &plan, chat.body(false)), dying);
    assert_eq!((answer.status.as_u16(), &*answer.code()), (502, "kvc_transfer_failed"));
    at_rest(&d).await;
    assert_eq!(d.engine().with(|s, _| s.pool.used()), 0);
}

/// D starts anew between sync and restore: its new epoch is empty and is restored like any other D.
#[tokio::test]
async fn a_d_that_starts_anew_is_restored() {
    let p = start(keeping(1000)).await;
    let d = start(pushing("d", 500, D2pTrigger::Commit)).await;
    let mut chat = Chat::new(words("mine", 600));
    let text = local(&d, &p, "t0", "s", &chat).await.text();
    pushed(&d).await;
    chat.say("assistant", text);
    let backed = kept(&p, &chat, 0) as u32;
    assert_eq!(backed as usize, chat.chain().len());
    chat.say("user", "go on");
    d.stop().await;
    let again = start(pushing("d", 500, D2pTrigger::Commit)).await;
    let (answer, _) = restore(&again, &p, "t1", "s", &chat, backed).await;
    assert_eq!(answer.text(), chat.reference());
    at_rest(&again).await;
    at_rest(&p).await;
}

/// A session rewritten after its sync: only the prefix both versions share is of use.
#[tokio::test]
async fn a_rewritten_session_is_restored_up_to_where_it_diverges() {
    let (p, d) = (start(keeping(1000)).await, start(pushing("d", 500, D2pTrigger::Commit)).await);
    let mut chat = Chat::new(words("mine", 600));
    let text = local(&d, &p, "t0", "s", &chat).await.text();
    pushed(&d).await;
    chat.say("assistant", text);
    let mut rewritten = Chat::new(words("mine", 600));
    rewritten.say("assistant", "a summary of what was said").say("user", words("on", 100));
    let common = kept(&p, &rewritten, 0);
    assert!(common >= 24 && common < kept(&p, &chat, 0), "{common}");
    let e = start(pushing("e", 500, D2pTrigger::Commit)).await;
    let (answer, _) = restore(&e, &p, "t1", "s", &rewritten, common as u32).await;
    assert_eq!(answer.text(), rewritten.reference());
    // Asking for more than the backup has of this version is refused, not guessed.
    let send = Plan::Restore {
        request_id: "t2".into(),
        session: SessionId::new("s"),
        push: Push { transfer_id: "t2".into(), to: e.kv_addr().unwrap().to_string(), from_block: 0 },
        blocks: common as u32 + 1,
    };
    assert_eq!(planned(&p, &send, rewritten.body(false)).await.status, 409);
    for node in [&p, &d, &e] {
        at_rest(node).await;
    }
}

/// Two gateways restore the same session at once, to the same D.
#[tokio::test]
async fn two_restores_of_one_session_do_not_disturb_each_other() {
    let (p, d) = (start(keeping(1000)).await, start(pushing("d", 500, D2pTrigger::Commit)).await);
    let mut chat = Chat::new(words("mine", 600));
    let text = local(&d, &p, "t0", "s", &chat).await.text();
    pushed(&d).await;
    let backed = kept(&p, &chat, 0) as u32;
    chat.say("assistant", text).say("user", "go on");
    let e = start(pushing("e", 500, D2pTrigger::Commit)).await;
    let (a, b) =
        tokio::join!(restore(&e, &p, "g1", "s", &chat, backed), restore(&e, &p, "g2", "s", &chat, backed));
    for (answer, _) in [a, b] {
        assert_eq!(answer.text(), chat.reference());
    }
    at_rest(&e).await;
    at_rest(&p).await;
}
