//! Books and keepers against scripted engines.

use std::cell::Cell;
use std::rc::Rc;

use rmpv::Value;

use super::books::{Forced, NotBegun, Served};
use super::*;
use crate::core::ledger::{AdmitReply, AdmitRequest};
use crate::core::types::{BlockHash, Mode, RejectReason, SessionId, StopKind};
use crate::engines::{EngineKind, fake};

fn config(k_d: Option<Tokens>) -> Arc<Config> {
    let engine = Engine::stock(EngineKind::Openai);
    Arc::new(Config { engine, options: Options::production(), k_d, kv_events: HashMap::new(), exact: false })
}

fn books(k_d: Tokens, slots: Option<u32>) -> Books {
    Books::new(&Options::production(), &Reading { slots, ..Reading::default() }, k_d, 7)
}

fn request(id: &str, session: &str, blocks: u64) -> AdmitRequest {
    let seed = session.len() as u64 * 1000 + u64::from(session.as_bytes()[0]) * 100_000;
    AdmitRequest {
        request_id: id.into(),
        session: SessionId::new(session),
        turn: 1,
        chain: (1..=blocks).map(|i| BlockHash(seed + i)).collect(),
        input_len: blocks * 24 + 5,
        output_reserve: 24,
    }
}

fn served(prompt: Tokens, completion: Tokens, cached: Tokens) -> Served {
    let stop = StopKind::ToolUse;
    Served { prompt: Some(prompt), completion: Some(completion), cached: Some(cached), stop }
}

fn mode(reply: AdmitReply) -> Result<Mode, RejectReason> {
    match reply {
        AdmitReply::Admitted { mode, .. } => Ok(mode),
        AdmitReply::Rejected { reason, .. } => Err(reason),
        AdmitReply::Stale => panic!("stale"),
    }
}

fn serve(books: &mut Books, id: &str, session: &str, blocks: u64, end: Served) -> Result<Mode, RejectReason> {
    let now = id.bytes().map(u64::from).sum::<u64>() * 10;
    let mode = mode(books.admit(request(id, session, blocks), now))?;
    books.begin(id, now).unwrap();
    books.commit(id, &end, now + 1);
    books.settle(now + 1);
    assert_eq!(books.ledger.leases(), 0);
    Ok(mode)
}

#[test]
fn a_turn_leaves_its_prompt_and_room_for_its_answer() {
    let mut books = books(24_000, None);
    assert_eq!(serve(&mut books, "1", "a", 100, served(2405, 240, 0)), Ok(Mode::Reseed));
    assert_eq!(books.ledger.occupied_blocks(), 110);
    // The answer's blocks come back within the next prompt: nothing is counted twice in the end.
    assert_eq!(serve(&mut books, "2", "a", 120, served(2885, 24, 2640)), Ok(Mode::Direct));
    assert_eq!(books.ledger.occupied_blocks(), 121);
}

/// A tokenizer with more tokens to a block than the nominal 24 makes the pool smaller in blocks.
#[test]
fn the_pool_follows_the_tokenizer() {
    let mut books = books(24_000, None);
    for i in 0..30 {
        let _ = serve(&mut books, &format!("r{i}"), "a", 100, served(3015, 0, 3000));
    }
    let (load, pool) = (books.load(), books.ledger.pool_blocks());
    // It moves in steps of 2 %.
    assert!((795..=820).contains(&pool), "{pool}");
    assert_eq!(load.k_d, 24_000);
    assert!(load.used.abs_diff(3000) < 60, "{load:?}");
    // 850 blocks would fit into 1000, and do not into 800.
    assert_eq!(mode(books.admit(request("x", "b", 850), 3)), Err(RejectReason::SessionNotResidentNoCapacity));
}

#[test]
fn what_the_engine_has_dropped_is_dropped_for_everyone() {
    let mut books = books(24_000, None);
    // One prompt in two sessions: "a" and "b" hold the same blocks.
    let shared = |id: &str, session: &str, blocks| AdmitRequest {
        session: SessionId::new(session),
        ..request(id, "a", blocks)
    };
    for (id, session) in [("1", "a"), ("2", "b")] {
        assert!(matches!(books.admit(shared(id, session, 100), 1), AdmitReply::Admitted { .. }));
        books.begin(id, 1).unwrap();
        assert_eq!(books.commit(id, &served(2412, 0, if id == "1" { 0 } else { 2400 }), 1), None);
        books.settle(1);
    }
    books.admit(shared("3", "a", 110), 2);
    books.begin("3", 2).unwrap();
    assert_eq!(books.commit("3", &served(2652, 0, 600), 2), Some(1800));
    books.settle(2);
    let held = |session: &str| books.ledger.residency().get(&SessionId::new(session)).map(|h| h.chain.len());
    assert_eq!((held("a"), held("b")), (Some(110), Some(25)));
}

#[test]
fn slots_bound_what_runs_and_what_stays() {
    let mut books = books(9600, Some(2));
    assert_eq!(serve(&mut books, "1", "a", 50, Served::default()), Ok(Mode::Reseed));
    assert_eq!(serve(&mut books, "2", "b", 50, Served::default()), Ok(Mode::Reseed));
    assert_eq!(serve(&mut books, "3", "a", 55, Served::default()), Ok(Mode::Direct));
    // A third session costs the one used longest ago, wherever the pool has room.
    assert_eq!(serve(&mut books, "4", "c", 50, Served::default()), Ok(Mode::Reseed));
    assert_eq!(mode(books.admit(request("5", "a", 60), 600)), Ok(Mode::Direct));
    assert_eq!(mode(books.admit(request("6", "b", 60), 600)), Ok(Mode::Reseed));
    assert_eq!(mode(books.admit(request("7", "a", 60), 600)), Err(RejectReason::NoDCapacity));
    assert_eq!(
        mode(books.admit(request("8", "d", 60), 600)),
        Err(RejectReason::SessionNotResidentNoCapacity)
    );
    // Asking again with the same id is the same grant, and takes no second slot.
    assert_eq!(mode(books.admit(request("6", "b", 60), 600)), Ok(Mode::Reseed));
    books.give_back("6", 601);
    books.settle(601);
    assert_eq!(mode(books.admit(request("9", "d", 60), 602)), Ok(Mode::Reseed));
}

#[test]
fn a_turn_nobody_admitted_is_counted_where_it_fits() {
    let mut books = books(2400, None);
    assert_eq!(books.force(request("1", "a", 90), 1), Ok(Forced::Counted(None)));
    assert_eq!(books.force(request("1", "a", 90), 1), Err(NotBegun::Running));
    assert_eq!(books.force(request("2", "b", 90), 1), Ok(Forced::Uncounted));
    assert_eq!((books.load().running, books.load().waiting), (1, 1));
    books.uncounted_ends();
    books.release("1", 2);
    books.settle(2);
    assert_eq!((books.load().running, books.load().waiting, books.load().used), (0, 0, 0));
}

fn keeper(addr: &str, k_d: Option<Tokens>) -> Arc<Keeper> {
    Keeper::new(
        format!("http://{addr}").into(),
        config(k_d),
        Fetch::new(&crate::engines::client::Connector::plain(Duration::from_secs(5))),
    )
}

#[actix_web::test]
async fn an_engine_is_asked_for_its_pool_and_told_apart_from_its_successor() {
    let work = Rc::new(Cell::new(10));
    let says = work.clone();
    let addr = fake::engine(move |line, _| fake::llama(line, 4, 2048, says.get())).await;
    let keeper = keeper(&addr, None);
    let first = keeper.meet().await.unwrap();
    assert_eq!((first.k_d, first.model.as_str()), (8192, "m"));
    let mut hold = keeper.force(request("1", "a", 50), true).unwrap();
    hold.commit(&Served::default());
    let running = keeper.force(request("2", "b", 50), true).unwrap();
    assert_eq!(running.slot(), Some(1));
    // The same engine, further on: the same life.
    work.set(20);
    assert_eq!(keeper.meet().await.unwrap().epoch, first.epoch);
    work.set(3);
    keeper.suspect();
    assert_eq!(keeper.watch().await, Unwell::Gone("it has started anew".into()));
    let second = keeper.meet().await.unwrap();
    assert_ne!(second.epoch, first.epoch);
    // The turn that ran on its predecessor ends without a trace.
    drop(running);
    assert_eq!(keeper.with(|books, _| (books.load().used, books.ledger.leases())), Some((0, 0)));
}

#[actix_web::test]
async fn what_is_wrong_with_an_engine_is_said() {
    let gone = keeper(&fake::nobody().await, None).meet().await.unwrap_err();
    assert!(matches!(&gone, Unwell::Gone(why) if why.contains("refused")), "{gone}");
    let loading = fake::engine(|_, _| Some((503, r#"{"error":"Loading model"}"#.into()))).await;
    assert_eq!(
        keeper(&loading, None).meet().await.unwrap_err().to_string(),
        "/health answered 503 Service Unavailable"
    );
    let other = fake::engine(|_, _| Some((200, "<html>".into()))).await;
    let said = keeper(&other, None).meet().await.unwrap_err().to_string();
    assert_eq!(said, "/v1/models answered 200 OK");
    let plain = |line: &str, _: &fake::Seen| match line {
        "GET /v1/models" => Some((200, r#"{"data":[{"id":"m"}]}"#.into())),
        _ => Some((404, "{}".into())),
    };
    let plain = fake::engine(plain).await;
    let said = keeper(&plain, None).meet().await.unwrap_err().to_string();
    assert_eq!(said, "it does not say how large its KV pool is: set `fleet.k_d` (tokens)");
    assert_eq!(keeper(&plain, Some(5000)).meet().await.unwrap().k_d, 5000);
}

/// A lease of an earlier life, or one that has ended, begins nothing.
#[actix_web::test]
async fn leases_end_with_the_life_that_granted_them() {
    let addr = fake::engine(|line, _| fake::llama(line, 4, 2048, 0)).await;
    let keeper = keeper(&addr, None);
    let epoch = keeper.meet().await.unwrap().epoch;
    keeper.with(|books, now| books.admit(request("1", "a", 50), now));
    assert_eq!(keeper.begin("1", epoch + 1, true).unwrap_err(), NotBegun::NoLease);
    let hold = keeper.begin("1", epoch, true).unwrap();
    assert_eq!(keeper.begin("1", epoch, true).unwrap_err(), NotBegun::Running);
    // Giving the lease back does not end the turn that runs on it; its own end does.
    assert_eq!(keeper.with(|books, now| books.give_back("1", now)), Some(true));
    assert_eq!(keeper.with(|books, _| books.ledger.leases()), Some(1));
    drop(hold);
    assert_eq!(keeper.with(|books, _| books.ledger.leases()), Some(0));
    assert_eq!(keeper.begin("1", epoch, true).unwrap_err(), NotBegun::NoLease);
}

/// A batch of one event, as vLLM publishes it.
fn event(kind: &str, hashes: std::ops::Range<u64>) -> Vec<u8> {
    batch_of(event_map(kind, hashes))
}

fn event_map(kind: &str, hashes: std::ops::Range<u64>) -> Value {
    let hashes = Value::Array(hashes.map(Value::from).collect());
    Value::Map(vec![
        ("type".into(), kind.into()),
        ("block_hashes".into(), hashes),
        ("block_size".into(), Value::from(24)),
    ])
}

fn with(event: Value, more: &[(&str, Value)]) -> Value {
    let Value::Map(mut pairs) = event else { panic!("{event}") };
    pairs.extend(more.iter().map(|(name, value)| ((*name).into(), value.clone())));
    Value::Map(pairs)
}

fn batch_of(event: Value) -> Vec<u8> {
    let mut out = Vec::new();
    let batch = Value::Array(vec![Value::F64(1.0), Value::Array(vec![event])]);
    rmpv::encode::write_value(&mut out, &batch).unwrap();
    out
}

/// Events bound what the books believe, empty them, and tell a new life.
#[actix_web::test]
async fn events_bound_the_books() {
    let addr = fake::engine(|line, _| fake::llama(line, 1, 48_000, 0).filter(|_| line != "GET /props")).await;
    let keeper = keeper(&addr, Some(48_000));
    keeper.meet().await.unwrap();
    let hear = |seq: u64, batch: &[u8]| keeper.heard(&[b"kv", &seq.to_be_bytes(), batch]);
    tokio::time::pause();
    let held = async || {
        tokio::time::advance(Duration::from_secs(3)).await;
        keeper.believe_events();
        keeper.with(|books, _| books.ledger.residency().blocks()).unwrap()
    };
    for (id, session) in [("1", "a"), ("2", "b")] {
        keeper.force(request(id, session, 100), true).unwrap().commit(&Served::default());
    }
    hear(0, &event("BlockStored", 0..200));
    assert_eq!(held().await, 200);
    hear(1, &event("BlockRemoved", 0..60));
    keeper.believe_events();
    assert_eq!(
        keeper.with(|books, _| books.ledger.residency().blocks()),
        Some(200),
        "more may be on the way"
    );
    assert_eq!(held().await, 140);
    // While a turn runs its blocks are on the way: nothing is compared.
    let running = keeper.force(request("3", "c", 10), true).unwrap();
    hear(2, &event("BlockRemoved", 60..150));
    assert_eq!(held().await, 140);
    drop(running);
    // After a gap the count is worth nothing, until the cache is cleared.
    hear(9, &event("BlockRemoved", 150..200));
    assert_eq!(held().await, 140);
    hear(10, &event("AllBlocksCleared", 0..0));
    assert_eq!(held().await, 0);
    assert!(keeper.is_up());
    tokio::time::resume();
    hear(0, &event("BlockStored", 0..1));
    assert!(!keeper.is_up(), "a publisher that counts from the beginning has started anew");
    assert!(matches!(keeper.watch().await, Unwell::Gone(_)));
}

/// With exact tokens what the engine drops is dropped by name, and nothing else.
#[actix_web::test]
async fn a_block_the_engine_drops_the_books_drop() {
    use crate::tokens::TokenChain;
    let addr = fake::engine(|line, _| fake::llama(line, 1, 48_000, 0).filter(|_| line != "GET /props")).await;
    let exact = Config { exact: true, ..(*config(Some(48_000))).clone() };
    let connector = crate::engines::client::Connector::plain(Duration::from_secs(5));
    let keeper = Keeper::new(format!("http://{addr}").into(), Arc::new(exact), Fetch::new(&connector));
    keeper.meet().await.unwrap();
    tokio::time::pause();
    let prompt = |from: u32| -> Vec<u32> { (from..from + 2400).collect() };
    for (id, from) in [("a", 0), ("b", 9000)] {
        let (mut root, mut chain) = (TokenChain::root("m"), Vec::new());
        root.extend(&mut chain, &prompt(from));
        let request = AdmitRequest { chain: chain.into(), ..request(id, id, 100) };
        keeper.force(request, true).unwrap().commit(&Served::default());
    }
    let stored = |hashes: std::ops::Range<u64>, from: u32, salt: Value| {
        let ids = prompt(from).into_iter().map(Value::from).collect();
        let more =
            [("token_ids", Value::Array(ids)), ("parent_block_hash", Value::Nil), ("cache_salt", salt)];
        with(event_map("BlockStored", hashes), &more)
    };
    let hear = |seq: u64, batch: Value| keeper.heard(&[b"kv", &seq.to_be_bytes(), &batch_of(batch)]);
    let held = async |session: &str| {
        tokio::time::advance(Duration::from_secs(2)).await;
        keeper.believe_events();
        let id = SessionId::new(session);
        keeper.with(|books, _| books.ledger.residency().get(&id).map_or(0, |held| held.chain.len())).unwrap()
    };
    hear(0, stored(0..100, 0, Value::Nil));
    hear(1, stored(100..200, 9000, Value::Nil));
    // The same tokens with a salt are other blocks.
    hear(2, stored(200..300, 0, "s".into()));
    hear(3, event_map("BlockRemoved", 200..300));
    assert_eq!((held("a").await, held("b").await), (100, 100));
    hear(4, event_map("BlockRemoved", 60..70));
    hear(5, event_map("BlockRemoved", 199..200));
    assert_eq!((held("a").await, held("b").await), (60, 99));
}

/// Over a real socket, with the publisher binding and connecting.
#[actix_web::test]
async fn events_arrive_over_zmq() {
    use zeromq::{PubSocket, Socket as _, SocketSend as _, ZmqMessage};
    let addr = fake::engine(|line, _| fake::llama(line, 1, 48_000, 0).filter(|_| line != "GET /props")).await;
    let url = format!("http://{addr}");
    let mut publisher = PubSocket::new();
    let endpoint = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let mut config = (*config(Some(48_000))).clone();
    config.kv_events.insert(url.clone(), Publisher { events: endpoint, replay: None });
    let keeper = Keeper::new(
        url.as_str().into(),
        Arc::new(config),
        Fetch::new(&crate::engines::client::Connector::plain(Duration::from_secs(5))),
    );
    keeper.meet().await.unwrap();
    let watch = keeper.watch();
    let publish = async {
        let mut seq = 0u64;
        // A subscriber hears what is sent after it has joined.
        while keeper.observe()["kv_events"]["cleared"].as_u64() == Some(0) {
            let mut message = ZmqMessage::from("kv");
            message.push_back(seq.to_be_bytes().to_vec().into());
            message.push_back(event("AllBlocksCleared", 0..0).into());
            publisher.send(message).await.unwrap();
            seq += 1;
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        unwell = watch => panic!("{unwell}"),
        () = publish => {}
    }
    assert_eq!(keeper.observe()["kv_events"]["cached_tokens"], 0);
}

/// What a listener that came late has missed the engine sends again.
#[actix_web::test]
async fn missed_events_are_asked_for() {
    use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};
    let addr = fake::engine(|line, _| fake::llama(line, 1, 48_000, 0).filter(|_| line != "GET /props")).await;
    let url = format!("http://{addr}");
    let (mut publisher, mut router) = (PubSocket::new(), RouterSocket::new());
    let events = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let replay = Some(router.bind("tcp://127.0.0.1:0").await.unwrap().to_string());
    let mut config = (*config(Some(48_000))).clone();
    config.kv_events.insert(url.clone(), Publisher { events, replay });
    let connector = crate::engines::client::Connector::plain(Duration::from_secs(5));
    let keeper = Keeper::new(url.as_str().into(), Arc::new(config), Fetch::new(&connector));
    keeper.meet().await.unwrap();
    // One block with each message; what is sent before the listener has joined nobody hears.
    let message = |seq: u64, batch: Vec<u8>| {
        let mut message = ZmqMessage::from("kv");
        message.push_back(seq.to_be_bytes().to_vec().into());
        message.push_back(batch.into());
        message
    };
    let publish = async {
        for seq in 7.. {
            publisher.send(message(seq, event("BlockStored", seq..seq + 1))).await.unwrap();
            tokio::task::yield_now().await;
            if keeper.observe()["kv_events"]["messages"].as_u64() > Some(8) {
                break;
            }
        }
    };
    let again = async {
        let asked = router.recv().await.unwrap();
        assert_eq!(asked.get(2).map(|from| &**from), Some(&0u64.to_be_bytes()[..]));
        // As vLLM does: all it has, later ones too, and an end.
        for seq in (0..500).chain([u64::MAX]) {
            let block = seq % 1000;
            let mut message = message(seq, event("BlockStored", block..block + 1));
            message.push_front(Vec::new().into());
            message.push_front(asked.get(0).unwrap().clone());
            router.send(message).await.unwrap();
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        unwell = keeper.watch() => panic!("{unwell}"),
        () = again => {}
        () = publish => {}
    }
    let told = keeper.observe()["kv_events"].clone();
    let heard = told["messages"].as_u64().unwrap();
    assert_eq!((&told["gaps"], &told["cached_tokens"]), (&json!(0), &json!(heard * 24)), "{told}");
}
