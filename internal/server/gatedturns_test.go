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
	g := &gatedStream{ServerStream: endlessStream{}, ctx: t.Context()}
	turns := testseed.TurnsBeside(func() {
		for range count {
			must(t, g.RecvMsg(new(pb.WatchRequest)))
		}
	})
	if least := int64(count * transport.MessageFrames / 64 / 2); turns < least {
		t.Errorf("others ran %d times while %d messages were received, want %d", turns, count, least)
	}
}

// TestAMessageThatComesAfterItsHandlerIsReleased: a goroutine of a handler may still receive. Each message is released once.
func TestAMessageThatComesAfterItsHandlerIsReleased(t *testing.T) {
	var released [3]int
	h := heldMessage{release: nothingHeld}
	for i := range released {
		if i == 2 {
			h.end()
		}
		h.replace(func() { released[i]++ })
	}
	if released != [3]int{1, 1, 1} {
		t.Errorf("the messages were released %v times", released)
	}
}
