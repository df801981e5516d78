"""What every gRPC server and client here needs: admission, heartbeat, metrics, logs."""
