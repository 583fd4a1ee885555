package server

import (
	"testing"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/transport"
)

// endlessStream always has a message.
type endlessStream struct{ grpc.ServerStream }

func (endlessStream) RecvMsg(any) error { return nil }

// TestHandlersOfSmallMessagesLetOthersRun: however many messages have come when a handler asks for the next one, on both transports.
func TestHandlersOfSmallMessagesLetOthersRun(t *testing.T) {
	const count = 10_000
	g := &gatedStream{ServerStream: endlessStream{}, ctx: t.Context(), release: nothingHeld}
	turns := testseed.TurnsBeside(func() {
		for range count {
			must(t, g.RecvMsg(new(pb.WatchRequest)))
		}
	})
	if least := int64(count * transport.MessageFrames / 64 / 2); turns < least {
		t.Errorf("others ran %d times while %d messages were received, want %d", turns, count, least)
	}
}
