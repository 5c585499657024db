//! Who is let in, over what, and what is said to whom it is not.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::rustls::pki_types::ServerName;

use super::rig::{Event, Rig, direct};
use crate::engines::fake::{self, Conn};
use crate::settings::keys::ApiKey;
use crate::settings::{Layers, Settings};

fn key(name: &str, key: &str, more: &str) -> String {
    let sha256 = ApiKey::hash(key.as_bytes());
    let key = ApiKey { name: name.into(), sha256, max_inflight: None, per_minute: None, admin: false };
    format!("{key}{more}")
}

async fn worker() -> String {
    fake::worker(|mut conn: Conn| async move {
        while let Some(seen) = conn.request().await {
            let shown = seen.header("authorization").unwrap_or("-").to_owned();
            let key = seen.header("x-api-key").unwrap_or("-").to_owned();
            conn.answer(200, &format!("{{\"authorization\":\"{shown}\",\"key\":\"{key}\"}}")).await;
        }
    })
    .await
}

#[actix_web::test]
async fn a_request_needs_a_key_and_the_key_stays_here() {
    let keys = format!("{},{}", key("a", "kvc-a", ""), key("root", "kvc-root", " admin"));
    let mut rig = Rig::with(&[("keys", &keys)], vec![Ok(direct(&worker().await))]);
    let refused = rig.post("", "{}").await;
    assert_eq!((refused.status(), refused.header("www-authenticate")), (401, "Bearer"));
    assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
    let refused = rig.post("x-api-key: kvc-b\r\n", "{}").await;
    assert_eq!((refused.status(), refused.header("x-kvc-mode")), (401, "failed"));
    let refused = rig.post_to("/v1/messages", "{}").await;
    assert_eq!(refused.json()["error"]["type"], "authentication_error");
    assert_eq!(rig.get("/v1/models").await.status(), 401);
    assert_eq!(rig.get("/health").await.status(), 200);
    let served = rig.post("authorization: Bearer kvc-a\r\nx-api-key: kvc-a\r\n", "{}").await;
    assert_eq!(served.body, r#"{"authorization":"-","key":"-"}"#);
    assert!(matches!(rig.end().await, Event::Finished(_)));
    for path in ["/metrics", "/admin/workers", "/admin/sessions"] {
        assert_eq!(rig.get(path).await.status(), 401, "{path}");
        let ask = |key: &'static str| rig.bare("GET", path, key);
        assert_eq!(ask("x-api-key: kvc-a\r\n").await.status(), 403, "{path}");
        assert_eq!(ask("x-api-key: kvc-root\r\n").await.status(), 200, "{path}");
    }
}

#[actix_web::test]
async fn workers_are_shown_a_key_of_their_own() {
    let flags = vec![("fleet.worker_key".to_owned(), "w-key".to_owned())];
    let rig = Rig::set(flags, vec![Ok(direct(&worker().await))]);
    let served = rig.post("authorization: Bearer mine\r\nx-api-key: mine\r\n", "{}").await;
    assert_eq!(served.body, r#"{"authorization":"Bearer w-key","key":"-"}"#);
}

#[actix_web::test]
async fn a_key_over_its_limits_is_told_when_to_come_again() {
    let rig = Rig::with(&[("keys", &key("a", "kvc-a", " rpm=1"))], vec![]);
    assert_eq!(rig.post("x-api-key: kvc-a\r\n", "{}").await.json()["error"]["code"], "no_capacity");
    let over = rig.post("x-api-key: kvc-a\r\n", "{}").await;
    assert_eq!((over.status(), over.header("retry-after")), (429, "60"));
    assert_eq!(over.json()["error"]["code"], "key_rate");
}

#[actix_web::test]
async fn administration_may_have_a_listener_of_its_own() {
    let rig = Rig::with(&[("admin_listen", "127.0.0.1:0")], vec![]);
    for path in ["/admin/workers", "/metrics"] {
        assert_eq!(rig.get(path).await.status(), 404, "{path}");
    }
    assert_eq!(rig.get("/health").await.status(), 200);
    let mut apart = Rig::new(vec![]);
    apart.addr = rig.admin.unwrap();
    for path in ["/admin/workers", "/metrics", "/health"] {
        assert_eq!(apart.get(path).await.status(), 200, "{path}");
    }
    assert_eq!(apart.post("", "{}").await.status(), 404);
}

#[test]
fn nobody_is_let_in_by_oversight() {
    let problem = |flags: &[(&str, &str)]| {
        let flags = flags.iter().map(|(k, v)| (format!("http.{k}"), (*v).to_owned())).collect();
        let settings = Settings::load(&Layers { flags, ..Layers::default() }).unwrap().settings;
        settings.require_access().err().map(|e| e.to_string()).unwrap_or_default()
    };
    let (user, admin) = (key("a", "k", ""), key("a", "k", " admin"));
    assert_eq!(problem(&[]), "");
    let open = problem(&[("listen", "0.0.0.0:80")]);
    assert!(open.contains("`http.auth = \"auto\"` is not allowed: set http.keys"), "{open}");
    assert_eq!(problem(&[("listen", "0.0.0.0:80"), ("auth", "open")]), "");
    assert_eq!(problem(&[("listen", "0.0.0.0:80"), ("keys", &user)]), "");
    assert!(problem(&[("auth", "keys")]).contains("http.auth"));
    let apart = [("listen", "[::]:80"), ("keys", user.as_str()), ("admin_listen", "0.0.0.0:81")];
    assert!(problem(&apart).contains("http.admin_listen"), "{}", problem(&apart));
    assert_eq!(problem(&[("listen", "[::]:80"), ("keys", &admin), ("admin_listen", "0.0.0.0:81")]), "");
    assert!(problem(&[("keys_file", "no/such")]).starts_with("no/such: "));
}

#[actix_web::test]
async fn answers_of_the_layer_below_are_in_the_apis_format_too() {
    let rig = Rig::with(&[("request_timeout_s", "1")], vec![]);
    let large = format!("GET /health HTTP/1.1\r\nhost: x\r\nx-large: {}\r\n\r\n", "x".repeat(200 << 10));
    let many = format!("GET /health HTTP/1.1\r\nhost: x\r\n{}\r\n", "x-many: 1\r\n".repeat(200));
    let cases = [
        ("nonsense\r\n\r\n", 400, "invalid_request"),
        (large.as_str(), 431, "head_too_large"),
        (many.as_str(), 431, "head_too_large"),
        ("GET /health HTTP/1.1\r\nhost:", 408, "request_timeout"),
        // Not a client that left: what came is no body.
        (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            400,
            "invalid_body",
        ),
    ];
    for (wire, status, code) in cases {
        let mut client = rig.connect().await;
        let _ = client.0.write_all(wire.as_bytes()).await;
        let answer = client.answer().await;
        assert_eq!((answer.status(), answer.json()["error"]["code"].as_str()), (status, Some(code)));
    }
}

#[actix_web::test]
async fn methods_and_old_clients() {
    let rig = Rig::new(vec![direct(&worker().await)]);
    assert_eq!(rig.bare("DELETE", "/admin/workers/x", "").await.status(), 404);
    for (method, path, allow) in [
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/health", "GET, HEAD"),
        ("PUT", "/admin/workers", "GET, POST"),
        ("GET", "/v1/responses", "POST"),
    ] {
        let answer = rig.bare(method, path, "").await;
        assert_eq!((answer.status(), answer.header("allow")), (405, allow), "{method} {path}");
    }
    let mut client = rig.connect().await;
    client.0.write_all(b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    client.0.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\n"), "{text}");
}

#[actix_web::test]
async fn a_stream_to_an_http_1_0_client_ends_with_its_connection() {
    const HEAD: &str =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let worker = fake::worker(|mut conn: Conn| async move {
        conn.request().await;
        conn.send(format!("{HEAD}e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")).await;
        conn.closed().await;
    })
    .await;
    let rig = Rig::new(vec![direct(&worker)]);
    let mut client = rig.connect().await;
    client.0.write_all(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
    let mut text = String::new();
    client.0.read_to_string(&mut text).await.unwrap();
    let lower = text.to_lowercase();
    assert!(lower.contains("200 ok") && !lower.contains("transfer-encoding"), "{text}");
    assert!(text.ends_with("\r\n\r\ndata: [DONE]\n\n"), "{text}");
}

#[actix_web::test]
async fn what_never_was_is_counted_and_shown_from_the_start() {
    let rig = Rig::new(vec![]);
    let metrics = rig.get("/metrics").await.body;
    for name in ["kvc_requests_total{outcome=\"direct\"", "kvc_inflight 0", "kvc_prompt_tokens_total"] {
        assert!(metrics.contains(name), "{name} is missing: {metrics}");
    }
    rig.get("/v1/nothing").await;
    rig.get("/v1/chat/completions").await;
    let metrics = rig.get("/metrics").await.body;
    for reason in ["not_found", "method_not_allowed"] {
        let line = format!("kvc_requests_total{{outcome=\"failed\",reason=\"{reason}\"}}");
        assert!(metrics.contains(&line), "{metrics}");
    }
}

#[actix_web::test]
async fn tls_on_the_listener_and_to_workers() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let (cert, private) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&private, made.signing_key.serialize_pem()).unwrap();
    let (cert, private) = (cert.to_str().unwrap().to_owned(), private.to_str().unwrap().to_owned());

    // A worker behind TLS: its end is a listener that hands the plain bytes on.
    let plain = worker().await;
    let acceptor = crate::engines::tls::server(&cert, &private).unwrap().unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let secure = listener.local_addr().unwrap();
    actix_web::rt::spawn(async move {
        let acceptor = tokio_rustls::TlsAcceptor::from(acceptor);
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut inner = TcpStream::connect(&plain).await.unwrap();
            actix_web::rt::spawn(async move {
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut inner).await;
            });
        }
    });
    let mut plan = direct("unused:1");
    plan.decode.url = format!("https://{secure}").into();
    let flags = [("http.tls_cert", &cert), ("http.tls_key", &private), ("fleet.ca_file", &cert)];
    let flags = flags.map(|(k, v)| (k.to_owned(), v.clone())).to_vec();
    let mut rig = Rig::set(flags, vec![Ok(plan.clone()), Ok(plan)]);

    let config = crate::engines::tls::client(&cert).unwrap();
    let connector = tokio_rustls::TlsConnector::from(config);
    let tcp = TcpStream::connect(rig.addr).await.unwrap();
    let mut client = connector.connect(ServerName::try_from("localhost").unwrap(), tcp).await.unwrap();
    for _ in 0..2 {
        let body = "x".repeat(100_000);
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        client.write_all((head + &body).as_bytes()).await.unwrap();
        let mut text = Vec::new();
        while !text.ends_with(b"\"key\":\"-\"}") {
            assert!(client.read_buf(&mut text).await.unwrap() > 0);
        }
        assert!(text.starts_with(b"HTTP/1.1 200 OK\r\n"));
        assert!(matches!(rig.end().await, Event::Finished(_)));
    }
    // Without the authority nothing is sent.
    let mut plan = direct("unused:1");
    plan.decode.url = format!("https://{secure}").into();
    let mut strict = Rig::set(vec![], vec![Ok(plan)]);
    assert_eq!(strict.post("", "{}").await.status(), 429);
    assert_eq!(strict.end().await, Event::Failed(crate::actors::api::Failure::DecodeUnreachable));
    // A certificate that is none is told by name.
    let error = crate::engines::tls::server("no/such.pem", &private).unwrap_err();
    assert!(error.contains("http.tls_cert") && error.contains("no/such.pem"), "{error}");
}
