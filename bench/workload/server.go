package workload

import (
	"context"
	"log/slog"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/server"
)

// StartServer runs a whole kvserver in this process until stop is called, and says where it serves.
func StartServer(c config.Config) (address string, stop func() error, err error) {
	s, err := server.Open(context.Background(), c, slog.New(slog.DiscardHandler))
	if err != nil {
		return "", nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	return s.Address(), func() error {
		cancel()
		return <-ended
	}, nil
}
