"""Chats: what a server makes of a template, of tool calls and of structured output."""
