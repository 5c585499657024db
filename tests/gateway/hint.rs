//! `x-codex-turn-state`: given to Codex only, and followed by a gateway that doesn't know the session.

use super::*;

const CODEX: (&str, &str) = ("originator", "codex_cli_rs");

/// A gateway over these workers; only one of them may be up.
async fn gateway(decode: &[String]) -> (String, RouterHandle) {
    let more = [("fleet.decode", &*decode.join(",")), ("sessions.hint_secret", "shared")];
    let router = Router::start(&settings(&[], &[], &more)).await.unwrap();
    let serving = router.serve().unwrap();
    let url = format!("http://{}", serving.addrs[0]);
    actix_web::rt::spawn(serving.server);
    while !router.turns().is_ready() {
        tokio::task::yield_now().await;
    }
    (url, router)
}

async fn ask(url: &str, headers: &[(&str, &str)]) -> HeaderMap {
    let text = "a long text, ".repeat(800);
    let body = json!({"model": MODEL, "max_output_tokens": 20, "input": [{"role": "user", "content": text}]});
    let mut request = Request::post(format!("{url}/v1/responses"))
        .header("thread-id", "thread-1")
        .header("session-id", "thread-1");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let (status, headers, body) = send(request, body.to_string().into()).await;
    assert_eq!(status, StatusCode::OK, "{body:?}");
    headers
}

#[actix_web::test]
async fn a_gateway_that_does_not_know_the_session_follows_the_hint() {
    let nodes = [node("n0", KvRole::Decode).await, node("n1", KvRole::Decode).await];
    let urls: Vec<String> = nodes.iter().map(Node::url).collect();
    let dead = |n: u8| format!("http://127.0.0.{n}:9");
    // Two gateways that each reach one of the workers leave the session at both.
    let (first, _a) = gateway(&[urls[0].clone(), dead(2)]).await;
    let (second, _b) = gateway(&[dead(3), urls[1].clone()]).await;
    let mut hints = Vec::new();
    for url in [&first, &second] {
        let headers = ask(url, &[CODEX]).await;
        hints.push(headers["x-codex-turn-state"].to_str().unwrap().to_owned());
        assert!(!ask(url, &[]).await.contains_key("x-codex-turn-state"), "for Codex only");
    }
    for (hint, worker) in hints.iter().zip(["d0", "d1"]) {
        let (third, router) = gateway(&urls).await;
        assert!(router.turns().all_up(Duration::from_secs(20)).await);
        let headers = ask(&third, &[CODEX, ("x-codex-turn-state", hint)]).await;
        assert_eq!(
            (mode(&headers), &headers["x-kvc-worker"]),
            ("direct", &worker.parse::<http::HeaderValue>().unwrap())
        );
    }
    // Forged, it is as good as none.
    let (third, _c) = gateway(&urls).await;
    let forged = hints[1].replace('.', ".A");
    assert_eq!(mode(&ask(&third, &[CODEX, ("x-codex-turn-state", &forged)]).await), "direct");
}
