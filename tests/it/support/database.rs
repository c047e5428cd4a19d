//! A database for each test.

use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

/// Creates one on the server with this URL; its name and its URL.
pub async fn create(server: &str) -> (String, String) {
    let name = format!("t{}", Uuid::now_v7().simple());
    execute(server, format!("create database {name}")).await;
    let url = with_database(server, &name);
    (name, url)
}

/// Drops it, whoever is still connected, and the user that belonged to it.
pub async fn drop(server: &str, name: &str, user: Option<&str>) {
    execute(server, format!("drop database {name} with (force)")).await;
    if let Some(user) = user {
        execute(server, format!("drop role {user}")).await;
    }
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
