//! A database for each test.

use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

/// Creates one; its name and its URL.
pub async fn create() -> (String, String) {
    let name = format!("t{}", Uuid::now_v7().simple());
    execute(&server_url(), format!("create database {name}")).await;
    let url = with_database(&server_url(), &name);
    (name, url)
}

/// Drops it, whoever is still connected, and the user that belonged to it.
pub async fn drop(url: &str, user: Option<&str>) {
    let name = url::Url::parse(url).expect("a URL").path().trim_start_matches('/').to_owned();
    execute(&server_url(), format!("drop database {name} with (force)")).await;
    if let Some(user) = user {
        execute(&server_url(), format!("drop role {user}")).await;
    }
}

/// The server's own database, which no test works in.
pub fn server_url() -> String {
    std::env::var("DATABASE_URL").expect("DATABASE_URL names the database server; `make test` sets it")
}

fn with_database(url: &str, name: &str) -> String {
    let mut url = url::Url::parse(url).expect("a URL");
    url.set_path(name);
    url.into()
}

/// Runs one statement on a connection of its own.
pub async fn execute(url: &str, sql: String) {
    let mut connection = PgConnection::connect(url).await.expect("the database server");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.expect("the right to create databases");
    connection.close().await.expect("a goodbye");
}
