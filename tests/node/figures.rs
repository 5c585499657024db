//! Figures, not checks: `cargo test --release --test node figures -- --ignored --nocapture`.

use std::time::{Duration, Instant};

use kvc_router::core::types::Mode;

use super::world::*;

fn p50(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "prints figures"]
async fn figures() {
    let (p, d) = (prefill().await, decode().await);
    let client = client();
    let mut chat = Chat::new(words("figure", 80_000));
    chat.max_tokens = Some(24);
    println!("body {} bytes, {} blocks", chat.body(true).len(), chat.chain().len());

    let start = Instant::now();
    let (mode, answer) = turn(&d, Some(&p), "t0", "s", 0, &chat).await;
    println!("{mode} of {} tokens by P, wall: {:?}", answer.usage().0, start.elapsed());
    assert_eq!((mode, answer.text()), (Mode::Seed, chat.reference()));
    chat.say("assistant", answer.text());

    let (mut admits, mut directs) = (Vec::new(), Vec::new());
    for i in 0..30 {
        chat.say("user", "one more question, and an answer to it");
        let id = format!("d{i}");
        let body = chat.body(true);
        let known = chat.chain().len() - 2;
        let start = Instant::now();
        let (mode, reuse) = granted(&admit_known(&d, &id, "s", 1, &chat, known).await);
        admits.push(start.elapsed());
        assert_eq!(mode, Mode::Direct);
        let request = request(&d, &leased(&d, &id, "s", mode, reuse, false), body);
        let start = Instant::now();
        let response = client.request(request).await.unwrap();
        directs.push(start.elapsed());
        let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
        let text = String::from_utf8(body.to_vec()).unwrap();
        let answer = Answer { status: 200.try_into().unwrap(), headers: Default::default(), body: text };
        chat.say("assistant", answer.text());
    }
    println!("admit p50 {:?} (new connection, request built in it)", p50(admits));
    println!("direct at 400 KB, head p50 {:?}", p50(directs));

    let small = Chat { max_tokens: Some(16), ..Chat::new("hello") };
    let mut times = Vec::new();
    for i in 0..300 {
        let request = request(&d, &fallback(&format!("s{i}"), None), small.body(true));
        let start = Instant::now();
        let response = client.request(request).await.unwrap();
        times.push(start.elapsed());
        http_body_util::BodyExt::collect(response.into_body()).await.unwrap();
    }
    println!("small turn, head p50 {:?}", p50(times));
}
