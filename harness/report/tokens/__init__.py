"""A check of chats in every form."""
