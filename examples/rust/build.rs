//! Generates the client from the API's files.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../../api");
    std::env::set_var("PROTOC", protoc_bin_vendored::protoc_bin_path()?);
    tonic_prost_build::configure().build_server(false).compile_protos(
        &["../../api/proto/epochkv/v1/kv.proto", "../../api/proto/epochkv/v1/transactions.proto"],
        &["../../api/proto", "../../api/third_party"],
    )?;
    Ok(())
}
